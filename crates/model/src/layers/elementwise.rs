//! A layer of an element-wise function.

use std::array::from_fn;

use paceline_kernels::function::{self, Function};
use paceline_memory::Tensor;

use crate::{Context, Half, Init, Layer, ParamId, Result, Saved, UnitBuilder};

/// `y = f(x)` for each element, with parameters for each column (the last dimension), if the function has some.
///
/// Snake (Ziyin et al., 2020), `x + sin(a x)^2 / a`, whose frequency `a` is learned:
///
/// ```
/// use paceline_kernels::Real;
/// use paceline_kernels::function::Function;
/// use paceline_model::layers::Elementwise;
/// use paceline_model::{Init, LayoutBuilder, gradcheck};
///
/// #[derive(Clone)]
/// struct Snake;
///
/// impl Function<1> for Snake {
///     const NAME: &'static str = "snake";
///
///     fn value<T: Real>(&self, x: T, [a]: [T; 1]) -> T {
///         x + (a * x).sin() * (a * x).sin() / a
///     }
///
///     fn derivatives<T: Real>(&self, x: T, [a]: [T; 1]) -> (T, [T; 1]) {
///         let (sin, both) = ((a * x).sin(), (a * x + a * x).sin()); // 2 sin(a x) cos(a x)
///         (T::from_f64(1.0) + both, [(x * both - sin * sin / a) / a])
///     }
/// }
///
/// let mut layout = LayoutBuilder::new();
/// let snake = Elementwise::new(&mut layout.unit("snake"), Snake, 6, [("a", Init::Constant(2.0))]);
/// let worst = gradcheck::worst_error(&snake, &layout.finish(1), &[4, 6], 42)?;
/// assert!(worst < 1e-7);
/// # Ok::<(), paceline_model::ModelError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Elementwise<F, const P: usize> {
    function: F,
    params: [ParamId; P],
}

impl<F: Function<P>, const P: usize> Elementwise<F, P> {
    /// The function with parameters of so many columns, by name and initial value.
    pub fn new(
        unit: &mut UnitBuilder,
        function: F,
        columns: usize,
        params: [(&str, Init); P],
    ) -> Self {
        Self { function, params: params.map(|(name, init)| unit.param(name, [columns], init)) }
    }

    fn params(&self, cx: &Context) -> Result<[Tensor; P]> {
        let found = self.params.iter().map(|id| cx.param(*id)).collect::<Result<Vec<_>>>()?;
        Ok(found.try_into().expect("as many as there are"))
    }
}

impl<F: Function<0>> Elementwise<F, 0> {
    /// A function without parameters.
    pub fn of(function: F) -> Self {
        Self { function, params: [] }
    }
}

impl<F: Function<P>, const P: usize> Layer for Elementwise<F, P> {
    fn name(&self) -> &'static str {
        F::NAME
    }

    fn has_parameters(&self) -> bool {
        P > 0
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let (params, output) = (self.params(cx)?, cx.activation(input.shape())?);
        function::value(cx.compute, &self.function, &input, params.each_ref(), &output)?;
        Ok((output, Saved::of([input])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let ([input], params) = (saved.tensors()?, self.params(cx)?);
        let (params, f) = (params.each_ref(), &self.function);
        if half.writes_weights() && P > 0 {
            let grads = self.params.iter().map(|id| cx.grad(*id)).collect::<Result<Vec<_>>>()?;
            let grads = from_fn(|k| (&grads[k], cx.accumulates(self.params[k])));
            function::parameter_gradients(cx.compute, f, input, params, &d_output, grads)?;
            self.params.iter().try_for_each(|id| cx.gradient_ready(*id))?;
        }
        if !half.wants_input() {
            return Ok(None);
        }
        let d_input = cx.gradient_of(input)?;
        function::input_gradient(cx.compute, f, input, params, &d_output, &d_input)?;
        Ok(Some(d_input))
    }
}
