//! A layer with parameters of its own, in a model of your own:
//! `cargo run --release --example own_layer -- train --model scaled --scaled-width 64 --nproc 2 --evaluate`

use std::process::ExitCode;

use paceline::model::Result;
use paceline::model::layers::Flatten;
use paceline::prelude::*;

/// y = gain * x: each column of (n, width) has a gain.
struct Scale {
    gain: ParamId, // (width)
}

impl Scale {
    fn new(unit: &mut UnitBuilder, width: usize) -> Self {
        Self { gain: unit.param("gain", [width], Init::Constant(1.0)) }
    }
}

impl Layer for Scale {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let (gain, output) = (cx.param(self.gain)?, cx.activation(input.shape())?);
        dispatch!("scale", input.dtype(), S => {
            // Parameters are f32 where activations are bf16.
            let (gain, x) = (gain.read::<<S as Stored>::Real>()?, input.read::<S>()?);
            for (at, y) in output.write::<S>()?.iter_mut().enumerate() {
                *y = S::store(x[at].load() * gain[at % gain.len()]);
            }
            Ok((output, Saved::of([input.clone()])))
        })
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        dy: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let ([input], gain) = (saved.tensors()?, cx.param(self.gain)?);
        dispatch!("scale", input.dtype(), S => {
            let (x, dy) = (input.read::<S>()?, dy.read::<S>()?);
            if half.writes_weights() && cx.trains(self.gain) {
                let (gradient, accumulates) = (cx.grad(self.gain)?, cx.accumulates(self.gain));
                let mut d_gain = gradient.write::<<S as Stored>::Real>()?;
                if !accumulates {
                    d_gain.fill(0.0);
                }
                let width = d_gain.len();
                (0..x.len()).for_each(|at| d_gain[at % width] += x[at].load() * dy[at].load());
                drop(d_gain); // from here on the strategy may send it
                cx.gradient_ready(self.gain)?;
            }
            if !half.wants_input() {
                return Ok(None);
            }
            let (gain, d_input) = (gain.read::<<S as Stored>::Real>()?, cx.gradient_of(input)?);
            for (at, dx) in d_input.write::<S>()?.iter_mut().enumerate() {
                *dx = S::store(dy[at].load() * gain[at % gain.len()]);
            }
            Ok(Some(d_input))
        })
    }
}

#[derive(Debug, Args)]
struct Scaled {
    /// Scaled: width of the hidden layer
    #[arg(long, value_name = "N", default_value_t = 64)]
    scaled_width: usize,
}

impl Own for Scaled {
    const NAME: &str = "scaled";
    const ABOUT: &str = "One hidden layer, whose outputs have a gain each";
}

impl ModelSettings for Scaled {
    fn build(&self, dataset: &dyn Dataset, world_size: usize) -> Result<Model, ModelError> {
        let (classes, inputs) = (dataset.num_classes(), dataset.input_shape().iter().product());
        let classes = classes.ok_or(ModelError::Config("scaled needs classes".into()))?;
        let mut layout = LayoutBuilder::new();
        let scaled = layout.block("scaled", |unit| {
            let hidden = Linear::new(unit, inputs, self.scaled_width, Activation::Relu);
            let scale = Scale::new(unit, self.scaled_width);
            let head = Linear::new(unit, self.scaled_width, classes, Activation::None);
            Sequence::new().then(Flatten).then(hidden).then(scale).then(head)
        });
        Ok(Model::new(Self::NAME, [scaled], CrossEntropy, layout.finish(world_size)))
    }
}

fn main() -> ExitCode {
    Program::new().model::<Scaled>().main()
}
