//! A model: blocks, an objective, and the layout of the parameters. It has no values.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use paceline_kernels::Compute;
use paceline_memory::Tensor;

use crate::layers::Chain;
use crate::{
    Batch, Block, Computed, Context, Half, Layer, Layout, Objective, OpenUnits, ParamId, Result,
    Saved, Storage,
};

/// Blocks that are computed one after the other, and an objective for the output of the last block.
///
/// ```
/// use paceline_kernels::linear::Activation;
/// use paceline_model::layers::Linear;
/// use paceline_model::{CrossEntropy, LayoutBuilder, Model};
///
/// let mut layout = LayoutBuilder::new();
/// let hidden = layout.block("hidden", |unit| Linear::new(unit, 2, 32, Activation::Relu));
/// let head = layout.block("head", |unit| Linear::new(unit, 32, 10, Activation::None));
/// let model = Model::new("mlp", [hidden, head], CrossEntropy, layout.finish(1));
/// assert_eq!(model.layout.num_params(), 3 * 32 + 33 * 10);
/// ```
pub struct Model {
    /// The name on the command line and in reports.
    pub name: &'static str,
    /// The blocks, first to last.
    pub blocks: Vec<Block>,
    /// Compares the output of the last block with the batch.
    pub objective: Box<dyn Objective>,
    /// Where the parameters lie.
    pub layout: Arc<Layout>,
}

impl Model {
    /// A model of these blocks, whose parameters are those of the layout.
    pub fn new(
        name: &'static str,
        blocks: impl Into<Vec<Block>>,
        objective: impl Objective + 'static,
        layout: Layout,
    ) -> Self {
        let (objective, layout) = (Box::new(objective), Arc::new(layout));
        Self { name, blocks: blocks.into(), objective, layout }
    }

    /// Freezes the units of these names: see [`Layout::with_frozen`].
    pub fn freeze(&mut self, units: &[String]) -> Result<()> {
        self.layout = Arc::new(self.layout.with_frozen(units)?);
        Ok(())
    }

    /// The same model with activation checkpointing of each block: see [`Checkpointed`](crate::layers::Checkpointed).
    pub fn checkpointed(self) -> Self {
        let blocks = self.blocks.into_iter().map(Block::checkpointed).collect();
        Self { blocks, ..self }
    }

    /// The blocks in `range` as one layer, such as a pipeline stage. Panics if there are fewer blocks.
    pub fn stage(&self, range: Range<usize>) -> Chain<'_, Block> {
        Chain(&self.blocks[range])
    }

    /// All blocks as one layer.
    pub fn network(&self) -> Chain<'_, Block> {
        Chain(&self.blocks)
    }

    /// The backward pass of all blocks. Nobody needs the gradient of the model's input.
    pub fn backward(&self, cx: &mut Context, mut saved: Saved, d_output: Tensor) -> Result<()> {
        let half = Half::Whole { wants_input: false };
        self.network().backward(cx, &mut saved, d_output, half).map(|_| ())
    }

    /// [`Objective::evaluate`], with the objective's unit open.
    pub fn evaluate(&self, cx: &mut Context, output: &Tensor, sums: &Tensor) -> Result<()> {
        match self.objective.unit() {
            Some(unit) => cx.forward_unit(unit, |cx| self.objective.evaluate(cx, output, sums)),
            None => self.objective.evaluate(cx, output, sums),
        }
    }

    /// [`Objective::logits`], with the objective's unit open.
    pub fn logits(&self, cx: &mut Context, output: &Tensor) -> Result<Option<Tensor>> {
        match self.objective.unit() {
            Some(unit) => cx.forward_unit(unit, |cx| self.objective.logits(cx, output)),
            None => self.objective.logits(cx, output),
        }
    }

    /// The logits of each sample's class in a batch, from whole parameters: see [`Objective::logits`].
    pub fn classify(
        &self,
        compute: &Compute,
        storage: &Storage,
        batch: &Batch,
    ) -> Result<Option<Tensor>> {
        let (mut units, mut hooks) = (OpenUnits::new(&self.layout), |_: ParamId| Ok(()));
        let cx = Context::evaluation(compute, storage, &mut units, &mut hooks);
        let mut cx = cx.with_batch(batch);
        cx.open_roots()?;
        let (output, _) = self.network().forward(&mut cx, batch.inputs().clone())?;
        self.logits(&mut cx, &output)
    }

    /// [`Objective::differentiate`], with the objective's unit open.
    pub fn differentiate(
        &self,
        cx: &mut Context,
        output: &Tensor,
        scale: f64,
        sums: &Tensor,
        put_off: Option<&mut Saved>,
    ) -> Result<Tensor> {
        let wants_input = true;
        let half = match put_off {
            Some(_) => Half::Input { wants_input },
            None => Half::Whole { wants_input },
        };
        let d_output = self.with_objective(cx, half, |cx| {
            self.objective.differentiate(cx, output, scale, sums, put_off)
        })?;
        cx.computed(Computed::LossGradient, &d_output)?;
        Ok(d_output)
    }

    /// [`Objective::backward_weight`], with the objective's unit open.
    pub fn backward_weight_of_objective(&self, cx: &mut Context, saved: &Saved) -> Result<()> {
        self.with_objective(cx, Half::Weight, |cx| self.objective.backward_weight(cx, saved))
    }

    fn with_objective<T>(
        &self,
        cx: &mut Context,
        half: Half,
        run: impl FnOnce(&mut Context) -> Result<T>,
    ) -> Result<T> {
        match self.objective.unit() {
            Some(unit) => cx.backward_unit(unit, half, run),
            None => run(cx),
        }
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Model({}, {} parameters)", self.name, self.layout.num_params())
    }
}
