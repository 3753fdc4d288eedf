//! The command line of paceline with a model, a data set and a strategy of our own: `cargo run -- train --help` lists them.

use paceline::model::Result;
use paceline::prelude::*;

/// A layer: y = gain * x. Each column of (n, width) has a gain, which is learned.
struct Scale(ParamId);

impl Scale {
    /// Writes gain * x, for elements of any type.
    fn scale(&self, cx: &Context, x: &Tensor, to: Tensor) -> Result<Tensor> {
        let gain = cx.param(self.0)?;
        dispatch!("scale", x.dtype(), S => {
            let (gain, x) = (gain.read::<<S as Stored>::Real>()?, x.read::<S>()?);
            for (at, y) in to.write::<S>()?.iter_mut().enumerate() {
                *y = S::store(gain[at % gain.len()] * x[at].load());
            }
            Ok(to)
        })
    }
}

impl Layer for Scale {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        Ok((self.scale(cx, &input, cx.activation(input.shape())?)?, Saved::of([input])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        dy: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let [input] = saved.tensors()?;
        if half.writes_weights() {
            let gain = cx.grad(self.0)?;
            dispatch!("scale", input.dtype(), S => {
                let mut d_gain = gain.write::<<S as Stored>::Real>()?;
                // A step may have several batches, whose gradients add up.
                d_gain.iter_mut().filter(|_| !cx.accumulates(self.0)).for_each(|d| *d = 0.0);
                let (x, dy, width) = (input.read::<S>()?, dy.read::<S>()?, d_gain.len());
                (0..x.len()).for_each(|at| d_gain[at % width] += x[at].load() * dy[at].load());
                drop(d_gain); // from here on the strategy may send it
                cx.gradient_ready(self.0)
            })?;
        }
        half.wants_input().then(|| self.scale(cx, &dy, cx.gradient_of(input)?)).transpose()
    }
}

/// Finite differences agree with the backward pass: `cargo test`.
#[test]
fn the_gradients_of_the_layer_are_right() {
    let mut layout = LayoutBuilder::new();
    layout.unit("scale");
    let layer = Scale(layout.param("gain", [3], Init::Constant(1.0)));
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
    fn build(&self, dataset: &dyn Dataset, world_size: usize) -> Result<Model> {
        let classes = dataset.num_classes().ok_or(ModelError::Config("no classes".into()))?;
        let mut layout = LayoutBuilder::new();
        let (unit, width) = (layout.unit("net"), self.net_width);
        let first = Linear::new(&mut layout, dataset.input_shape()[0], width, Activation::Relu);
        let scale = Scale(layout.param("gain", [width], Init::Constant(1.0)));
        let last = Linear::new(&mut layout, width, classes, Activation::None);
        let blocks = vec![Block::new(unit, Sequence::new().then(first).then(scale).then(last))];
        let (layout, objective) = (Arc::new(layout.finish(world_size)), Box::new(CrossEntropy));
        Ok(Model { name: Self::NAME, blocks, objective, layout, activation_elems: 2 * width })
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
    fn open(&self, _seed: u64, split: Split) -> paceline::Result<Arc<dyn Dataset>> {
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
