//! A model of your own, with a layer of your own, and flags for both:
//! `cargo run --release --example own_model -- train --model powers --hidden-width 64 --nproc 2 --evaluate`

use std::process::ExitCode;
use std::sync::Arc;

use paceline::model::Result;
use paceline::model::layers::Flatten;
use paceline::prelude::*;

/// y = max(x, 0)^p. For p = 2 it is the squared ReLU of So et al., 2021.
struct Power(f32);

impl Power {
    fn value<T: Real>(&self, x: T) -> T {
        T::from_f64(x.to_f64().max(0.0).powf(self.0.into()))
    }

    /// p max(x, 0)^(p - 1), and 0 where x <= 0.
    fn slope<T: Real>(&self, x: T) -> T {
        let (x, p) = (x.to_f64(), f64::from(self.0));
        T::from_f64(if x > 0.0 { p * x.powf(p - 1.0) } else { 0.0 })
    }
}

impl Layer for Power {
    fn has_parameters(&self) -> bool {
        false
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let output = cx.activation(input.shape())?;
        dispatch!("power", input.dtype(), S => {
            for (y, x) in output.write::<S>()?.iter_mut().zip(input.read::<S>()?.iter()) {
                *y = S::store(self.value(x.load()));
            }
            Ok((output, Saved::of([input])))
        })
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        dy: Tensor,
        _: Half,
    ) -> Result<Option<Tensor>> {
        let [input] = saved.tensors()?;
        let d_input = cx.gradient_of(input)?;
        dispatch!("power", input.dtype(), S => {
            let (x, dy) = (input.read::<S>()?, dy.read::<S>()?);
            for (i, dx) in d_input.write::<S>()?.iter_mut().enumerate() {
                *dx = S::store(self.slope(x[i].load()) * dy[i].load());
            }
            Ok(Some(d_input))
        })
    }
}

/// The model with its settings, which are its flags.
#[derive(Debug, Args)]
struct Powers {
    /// Powers: width of the hidden layer
    #[arg(long, value_name = "N", default_value_t = 64)]
    hidden_width: usize,
    /// Powers: the power to which positive values are raised
    #[arg(long, value_name = "P", default_value_t = 2.0)]
    power: f32,
}

impl Own for Powers {
    const NAME: &str = "powers";
    const ABOUT: &str = "One hidden layer, whose positive outputs are raised to a power";
}

impl ModelSettings for Powers {
    fn build(&self, dataset: &dyn Dataset, world_size: usize) -> Result<Model> {
        let (classes, inputs) = (dataset.num_classes(), dataset.input_shape().iter().product());
        let num_classes = classes.ok_or(ModelError::Config("powers needs classes".into()))?;
        let mut layout = LayoutBuilder::new();
        let unit = layout.unit("hidden");
        let linear = Linear::new(&mut layout, inputs, self.hidden_width, Activation::None);
        let hidden = Sequence::new().then(Flatten).then(linear).then(Power(self.power));
        let hidden = Block::new(unit, hidden);
        let unit = layout.unit("head");
        let head = Linear::new(&mut layout, self.hidden_width, num_classes, Activation::None);
        Ok(Model {
            name: Self::NAME,
            blocks: vec![hidden, Block::new(unit, head)],
            objective: Box::new(CrossEntropy),
            layout: Arc::new(layout.finish(world_size)),
            activation_elems: inputs + 2 * self.hidden_width + num_classes,
        })
    }
}

fn main() -> ExitCode {
    Program::new().model::<Powers>().main()
}
