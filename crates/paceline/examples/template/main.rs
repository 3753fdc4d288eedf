//! The command line of paceline with a model, a data set and a strategy of our own: `cargo run -- train --help` lists them.

use paceline::prelude::*;

/// A layer: y = gain * x. Each column of (n, width) has a gain, which is learned.
#[derive(Clone)]
struct Scale;

impl Function<1> for Scale {
    const NAME: &'static str = "scale";

    fn value<T: Real>(&self, x: T, [gain]: [T; 1]) -> T {
        gain * x
    }

    /// By x, and by the gain.
    fn derivatives<T: Real>(&self, x: T, [gain]: [T; 1]) -> (T, [T; 1]) {
        (gain, [x])
    }
}

/// The gains begin as 1.
fn scale(unit: &mut UnitBuilder, width: usize) -> Elementwise<Scale, 1> {
    Elementwise::new(unit, Scale, width, [("gain", Init::Constant(1.0))])
}

/// Finite differences agree with the backward pass: `cargo test`.
#[test]
fn the_gradients_of_the_layer_are_right() {
    let mut layout = LayoutBuilder::new();
    let layer = scale(&mut layout.unit("scale"), 3);
    let worst = paceline::model::gradcheck::worst_error(&layer, &layout.finish(1), &[4, 3], 42);
    assert!(worst.as_ref().is_ok_and(|error| *error < 1e-7), "{worst:?}");
}

/// The model. The fields are its flags.
#[derive(Debug, Args)]
struct ScaledNet {
    /// scaled_net: width of the hidden layer
    #[arg(long, default_value_t = 32)]
    net_width: usize,
}

impl Own for ScaledNet {
    const NAME: &str = "scaled_net";
    const ABOUT: &str = "One hidden layer, whose outputs have a gain each";
}

impl ModelSettings for ScaledNet {
    fn build(&self, dataset: &dyn Dataset, world_size: usize) -> Result<Model, ModelError> {
        let classes = dataset.num_classes().ok_or(ModelError::Config("no classes".into()))?;
        let mut layout = LayoutBuilder::new();
        let width = self.net_width;
        let net = layout.block("net", |unit| {
            let first = Linear::new(unit, dataset.input_shape()[0], width, Activation::Relu);
            let scale = scale(unit, width);
            let last = Linear::new(unit, width, classes, Activation::None);
            Sequence::new().then(first).then(scale).then(last)
        });
        Ok(Model::new(Self::NAME, [net], CrossEntropy, layout.finish(world_size)))
    }
}

/// The data set: points of a square, with the class 1 within a circle.
#[derive(Debug, Args)]
struct Circle {}

impl Own for Circle {
    const NAME: &str = "circle";
    const ABOUT: &str = "Points within and outside of a circle";
}

impl DataSettings for Circle {
    fn open(&self, _seed: u64, split: Split) -> Result<Arc<dyn Dataset>> {
        Ok(Arc::new(Points(if split == Split::Train { 0..4000 } else { 4000..5000 })))
    }
}

struct Points(std::ops::Range<usize>);

impl Dataset for Points {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn fields(&self) -> Vec<Field> {
        vec![Field::f32("inputs", [2]), Field::class(2)]
    }

    fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
        let number = (self.0.start + index) as f64; // each rank must read the same for it
        let [x, y] = [0.754_877_67, 0.569_840_29].map(|step| 2.0 * (number * step).fract() - 1.0);
        sample.f32("inputs").copy_from_slice(&[x as f32, y as f32]);
        sample.set_class(i64::from(x * x + y * y < 0.64));
    }
}

/// The strategy: one all-reduce of all gradients, after the backward pass.
#[derive(Clone, Debug, Args)]
struct OneReduce {}

impl Own for OneReduce {
    const NAME: &str = "one_reduce";
    const ABOUT: &str = "One all-reduce of everything, after the backward pass";
}

impl OwnStrategy for OneReduce {}

impl Strategy for OneReduce {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Exact // it ends with the weights of ddp, bit by bit
    }

    fn finish_gradients(&mut self, cx: &mut StepContext) -> StrategyResult<()> {
        let (group, grads) = (&cx.replica.group, cx.replica.storage.grads().tensor());
        Ok(cx.track.record(span::EXPOSED, || group.all_reduce(grads, ReduceOp::Mean)).map(drop)?)
    }
}

fn main() -> std::process::ExitCode {
    Program::new().model::<ScaledNet>().data_set::<Circle>().strategy::<OneReduce>().main()
}
