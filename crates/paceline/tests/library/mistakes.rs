//! The likely mistakes in a layer, a loop, a strategy and a data set of one's own. The page docs/extending.md has a row for each.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use paceline::data::{Loader, LoaderConfig, SampleOrder, Sampler};
use paceline::model::{Result as LayerResult, gradcheck};
use paceline::prelude::*;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    NextWidth,
    NoGradient,
    NoInputGradient,
    Columns,
    Slope,
    TargetType,
    TargetCount,
    Class,
    BatchCount,
    EarlyEnd,
    HeldBatch,
    NotReduced,
    NotWaited,
    OtherOrder,
    UnknownField,
    ClassOfSample,
}
use Mistake::*;

/// y = gain * x
struct Scale {
    gain: ParamId, // (32)
    mistake: Mistake,
}

impl Layer for Scale {
    fn forward(&self, cx: &mut Context, input: Tensor) -> LayerResult<(Tensor, Saved)> {
        let (gain, output) = (cx.param(self.gain)?, cx.activation(input.shape())?);
        let (gain, x) = (gain.read::<f32>()?, input.read::<f32>()?);
        for (at, y) in output.write::<f32>()?.iter_mut().enumerate() {
            *y = x[at] * gain[at % 32];
        }
        Ok((output, Saved::of([input.clone()])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        dy: Tensor,
        _: Half,
    ) -> LayerResult<Option<Tensor>> {
        let [input] = saved.tensors()?;
        if self.mistake != NoGradient {
            cx.grad(self.gain)?.write::<f32>()?.fill(1.0);
            cx.gradient_ready(self.gain)?;
        }
        let d_input = cx.gradient_of(input)?;
        d_input.write::<f32>()?.copy_from_slice(&dy.read::<f32>()?);
        Ok((self.mistake != NoInputGradient).then_some(d_input))
    }
}

/// y = a x
#[derive(Clone)]
struct Times;

impl Function<1> for Times {
    const NAME: &'static str = "times";

    fn value<T: Real>(&self, x: T, [a]: [T; 1]) -> T {
        a * x
    }

    /// The second one should be x.
    fn derivatives<T: Real>(&self, x: T, [a]: [T; 1]) -> (T, [T; 1]) {
        (a, [x + x])
    }
}

struct Mine(Mistake);

impl Strategy for Mine {
    fn name(&self) -> &'static str {
        "mine"
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Exact
    }

    fn finish_gradients(&mut self, cx: &mut StepContext) -> StrategyResult<()> {
        let Replica { group, storage, .. } = cx.replica;
        let grads = storage.grads();
        match self.0 {
            NotReduced => {}
            NotWaited => drop(group.all_reduce_async(grads.tensor(), ReduceOp::Mean)?),
            OtherOrder if group.rank() == 1 => {
                group.all_reduce(&grads.slice(0..8)?, ReduceOp::Mean)?;
            }
            _ => drop(group.all_reduce(grads.tensor(), ReduceOp::Mean)?),
        }
        Ok(())
    }
}

struct Points(Mistake);

impl Dataset for Points {
    fn len(&self) -> usize {
        8
    }

    fn fields(&self) -> Vec<Field> {
        vec![Field::f32("inputs", [2]), Field::class(2)]
    }

    fn read(&self, _: u64, index: usize, sample: &mut Sample<'_>) {
        sample.f32(if self.0 == UnknownField { "input" } else { "inputs" }).fill(index as f32);
        sample.set_class(7);
    }
}

fn batch(mistake: Mistake, rank: usize) -> Result<Batch> {
    let memory = Allocator::new();
    let inputs = memory.tensor(DType::F32, [64, 2], Category::Data)?;
    inputs.write::<f32>()?.fill(1.0 + rank as f32);
    if mistake == TargetType {
        return Ok(Batch::new(inputs, memory.tensor(DType::F32, [64], Category::Data)?));
    }
    let count = if mistake == TargetCount { 63 } else { 64 };
    let targets = memory.tensor(DType::I64, [count], Category::Data)?;
    targets.write::<i64>()?.fill(if mistake == Class { 7 } else { rank as i64 });
    Ok(Batch::new(inputs, targets))
}

fn train(mistake: Mistake, group: Group) -> Result<()> {
    let (rank, mut layout) = (group.rank(), LayoutBuilder::new());
    let hidden = layout.block("hidden", |unit| {
        let linear = Linear::new(unit, 2, 32, Activation::Relu);
        let gain = unit.param("gain", [32], Init::Constant(1.0));
        let columns = if mistake == Columns { 16 } else { 32 };
        let times = Elementwise::new(unit, Times, columns, [("a", Init::Constant(1.0))]);
        Sequence::new().then(linear).then(Scale { gain, mistake }).then(times)
    });
    let inputs = if mistake == NextWidth { 16 } else { 32 };
    let head = layout.block("head", |unit| Linear::new(unit, inputs, 2, Activation::None));
    let world_size = group.world_size();
    let model = Model::new("mine", [hidden, head], CrossEntropy, layout.finish(world_size));
    let mut trainer = Trainer::new(model, Mine(mistake), group, AdamW::default())?;
    for step in 0..3 {
        if mistake == EarlyEnd && (rank, step) == (1, 2) {
            return Ok(());
        }
        let own = batch(mistake, rank)?;
        let held = (mistake == HeldBatch).then(|| own.inputs().write::<f32>()).transpose()?;
        let count = if mistake == BatchCount { 1 + rank } else { 1 };
        trainer.step(&vec![own; count])?;
        drop(held);
    }
    trainer.digest()?;
    Ok(())
}

fn read(mistake: Mistake) -> Result<()> {
    let (dataset, config) = (Arc::new(Points(mistake)), LoaderConfig::default());
    let sampler = Sampler::new(8, 4, 0, 1, SampleOrder::Sequential)?;
    Loader::new(dataset, sampler, Allocator::new(), config)?.next().unwrap()?;
    Ok(())
}

fn said(mistake: Mistake) -> String {
    match mistake {
        UnknownField | ClassOfSample => read(mistake).unwrap_err().to_string(),
        Slope => {
            let mut layout = LayoutBuilder::new();
            let unit = &mut layout.unit("times");
            let layer = Elementwise::new(unit, Times, 6, [("a", Init::Constant(1.0))]);
            let worst = gradcheck::worst_error(&layer, &layout.finish(1), &[4, 6], 42).unwrap();
            assert!(worst > 0.1, "{worst}");
            "`gradcheck::worst_error` is above 0.1, and not below 1e-7".to_owned()
        }
        _ => thread::scope(|scope| {
            let groups = Group::threads(2).into_iter();
            let ranks: Vec<_> =
                groups.map(|group| scope.spawn(move || train(mistake, group))).collect();
            let mut ends = ranks.into_iter().map(|rank| rank.join().unwrap());
            ends.find_map(Result::err).expect("a rank fails").to_string()
        }),
    }
}

/// Numbers of operations may change; each row of the page has a word of its own for them.
fn without_numbers(text: &str) -> String {
    let words = text.split(' ').map(|word| if word.starts_with('#') { "#N" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn the_page_has_what_is_said_about_each_mistake() {
    let all = [
        NextWidth,
        NoGradient,
        NoInputGradient,
        Columns,
        Slope,
        TargetType,
        TargetCount,
        Class,
        BatchCount,
        EarlyEnd,
        HeldBatch,
        NotReduced,
        NotWaited,
        OtherOrder,
        UnknownField,
        ClassOfSample,
    ];
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/extending.md");
    let page = without_numbers(&fs::read_to_string(page).unwrap());
    let missing: Vec<_> = all
        .map(|mistake| (mistake, without_numbers(&said(mistake))))
        .into_iter()
        .filter(|(_, said)| !page.contains(said.as_str()))
        .collect();
    assert!(missing.is_empty(), "docs/extending.md lacks {missing:#?}");
}
