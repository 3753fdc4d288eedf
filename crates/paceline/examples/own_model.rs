//! A model of your own, with a layer of your own, and flags for both:
//! `cargo run --release --example own_model -- train --model powers --hidden-width 64 --nproc 2 --evaluate`

use std::process::ExitCode;

use paceline::model::layers::Flatten;
use paceline::prelude::*;

/// y = max(x, 0)^p. For p = 2 it is the squared ReLU of So et al., 2021.
#[derive(Clone)]
struct Power(f32);

impl Function<0> for Power {
    const NAME: &'static str = "power";

    fn value<T: Real>(&self, x: T, _: [T; 0]) -> T {
        x.max(T::default()).powf(T::from_f64(self.0.into()))
    }

    /// p max(x, 0)^(p - 1), and 0 where x <= 0.
    fn derivatives<T: Real>(&self, x: T, _: [T; 0]) -> (T, [T; 0]) {
        let p = T::from_f64(self.0.into());
        let slope = p * x.powf(p - T::from_f64(1.0));
        (if x > T::default() { slope } else { T::default() }, [])
    }

    const CARD: &'static str = "
template <typename R> __device__ R value(R x, const R*, const double* p) {
    return x > 0 ? pow(x, R(p[0])) : R(0);
}
template <typename R> __device__ R derivatives(R x, const R*, const double* p, R*) {
    return x > 0 ? R(p[0]) * pow(x, R(p[0]) - 1) : R(0);
}";

    fn settings(&self) -> [f64; 4] {
        [self.0.into(), 0.0, 0.0, 0.0]
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
    fn build(&self, dataset: &dyn Dataset, world_size: usize) -> Result<Model, ModelError> {
        let (classes, inputs) = (dataset.num_classes(), dataset.input_shape().iter().product());
        let num_classes = classes.ok_or(ModelError::Config("powers needs classes".into()))?;
        let mut layout = LayoutBuilder::new();
        let hidden = layout.block("hidden", |unit| {
            let linear = Linear::new(unit, inputs, self.hidden_width, Activation::None);
            Sequence::new().then(Flatten).then(linear).then(Elementwise::of(Power(self.power)))
        });
        let head = layout.block("head", |unit| {
            Linear::new(unit, self.hidden_width, num_classes, Activation::None)
        });
        Ok(Model::new(Self::NAME, [hidden, head], CrossEntropy, layout.finish(world_size)))
    }
}

fn main() -> ExitCode {
    Program::new().model::<Powers>().main()
}
