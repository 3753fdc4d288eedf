//! Optimizer steps over flat storage, in one pass.
//!
//! The numbers of a step, such as the learning rate, are arguments of the step, or lie in the memory of the device, for work that
//! is captured once and replayed.

use paceline_cuda::kernel::Out;
use paceline_cuda::{Grid, KernelSource};
use paceline_memory::Tensor;

use crate::card::NUMBERS;
use crate::operands::Read;
use crate::simd::vectorized;
use crate::stored::dispatch;
use crate::threads::batches;
use crate::{Compute, Op, Real, Result, read, update};

pub(crate) static CARD: KernelSource =
    KernelSource::new("optimizer.cu", include_str!("optimizer.cu"), &[NUMBERS]);

/// Stochastic gradient descent, as in PyTorch's `SGD` without dampening and Nesterov.
///
/// ```
/// use paceline_kernels::optimizer::Sgd;
///
/// let optimizer = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0 };
/// assert!(optimizer.momentum < 1.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// Factor of the running sum of gradients. With zero no such sum is kept.
    pub momentum: f64,
    /// Factor with which the parameter is added to its gradient.
    pub weight_decay: f64,
}

/// AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), as in PyTorch's `AdamW`.
///
/// ```
/// use paceline_kernels::optimizer::AdamW;
///
/// let optimizer = AdamW { lr: 0.01, ..AdamW::default() };
/// assert_eq!((optimizer.beta1, optimizer.weight_decay), (0.9, 0.01));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Parameters shrink by this factor times the learning rate.
    pub weight_decay: f64,
}

/// The defaults of PyTorch.
impl Default for AdamW {
    fn default() -> Self {
        Self { lr: 0.001, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }
}

/// The numbers of a step, or their place on the device.
#[derive(Clone, Copy, Debug)]
pub enum StepNumbers<'t, const N: usize> {
    /// The numbers.
    Here([f64; N]),
    /// A tensor of the parameters' type with these numbers, rounded to it.
    InMemory(&'t Tensor),
}

impl<const N: usize> StepNumbers<'_, N> {
    /// The numbers in the type of the parameters, as far as the host knows them, and the operand.
    fn parts<T: Real>(&self) -> ([T; N], Option<Read<'_, T>>) {
        match self {
            StepNumbers::Here(numbers) => (numbers.map(T::from_f64), None),
            StepNumbers::InMemory(tensor) => {
                ([T::from_f64(0.0); N], Some(read::<T>("numbers", tensor, [N])))
            }
        }
    }
}

/// The numbers of a body that got them as an operand, or not.
fn found<T: Real, const N: usize>(here: [T; N], in_memory: Option<&[T]>) -> [T; N] {
    in_memory.map_or(here, |numbers| std::array::from_fn(|at| numbers[at]))
}

impl Sgd {
    /// The numbers of a step: the factor of the gradient, the learning rate, the momentum and the weight decay.
    pub fn numbers(&self, factor: f64) -> [f64; 4] {
        [factor, self.lr, self.momentum, self.weight_decay]
    }
}

/// `g' = factor * g + weight_decay * p; v = momentum * v + g'; p -= lr * v`, without `v` if there is no momentum (`velocity`
/// is `None`), with the numbers of [`Sgd::numbers`]. The factor stands beside the gradients; it is 1 unless they are scaled. All
/// tensors have the same length, f32 or f64; updates in place.
pub fn sgd(
    compute: &Compute,
    numbers: StepNumbers<'_, 4>,
    params: &Tensor,
    grads: &Tensor,
    velocity: Option<&Tensor>,
) -> Result<()> {
    let op = Op::new("sgd").elementwise([4, params.num_elems()]);
    dispatch!(op.name, params.dtype(), T: f32 | f64 => {
        let shape = params.shape();
        let (here, in_memory) = numbers.parts::<T>();
        let operands = (
            update::<T>("parameters", params, shape),
            read::<T>("gradients", grads, shape),
            velocity.map(|velocity| update::<T>("velocity", velocity, shape)),
            in_memory,
        );
        let n = params.num_elems();
        compute.launch_with_card(op, operands, move |cpu, (p, g, v, of)| {
            let factors = found(here, of);
            let len = p.len();
            let v: &mut [T] = v.unwrap_or_default();
            let v_elems = usize::from(!v.is_empty());
            let parts = batches(cpu, p, 1, len).into_iter().zip(batches(cpu, v, v_elems, len));
            cpu.threads.for_each(parts.collect(), |((first, p), (_, v))| {
                let g = &g[first..first + p.len()];
                if v.is_empty() {
                    vectorized!(cpu.simd, sgd_plain::<T>, factors, p, g);
                } else {
                    vectorized!(cpu.simd, sgd_momentum::<T>, factors, p, g, v);
                }
            });
            Ok(())
        }, move |card, (p, g, v, of)| {
            let v = v.unwrap_or(Out::NONE);
            let (grid, n) = (Grid::fours(n), n as u64);
            // SAFETY: all that are there have `n` elements, and the numbers are four.
            unsafe {
                match of {
                    Some(of) => card.launch(CARD.of::<T>("sgd_from"), (p, g, v, of, n), grid),
                    None => card.launch(CARD.of::<T>("sgd"), (p, g, v, here, n), grid),
                }
            }
        })
    })
}

#[inline(always)]
fn sgd_plain<T: Real>([factor, lr, _, weight_decay]: [T; 4], p: &mut [T], g: &[T]) {
    for (p, g) in p.iter_mut().zip(g) {
        *p = *p - lr * (factor * *g + weight_decay * *p);
    }
}

#[inline(always)]
fn sgd_momentum<T: Real>(factors: [T; 4], p: &mut [T], g: &[T], v: &mut [T]) {
    let [factor, lr, momentum, weight_decay] = factors;
    for ((p, g), v) in p.iter_mut().zip(g).zip(v) {
        *v = momentum * *v + (factor * *g + weight_decay * *p);
        *p = *p - lr * *v;
    }
}

impl AdamW {
    /// The numbers of a step, the `step`-th counted from 1: the factor of the gradient, `beta1`, `1 - beta1`, `beta2`, `1 - beta2`,
    /// `eps`, by what parameters shrink, the learning rate over the bias correction of the first moment, and one over the square
    /// root of that of the second.
    pub fn numbers(&self, step: u64, factor: f64) -> [f64; 9] {
        let AdamW { lr, beta1, beta2, eps, weight_decay } = *self;
        let shrink = 1.0 - lr * weight_decay;
        let rate = lr / (1.0 - beta1.powf(step as f64));
        let root = 1.0 / (1.0 - beta2.powf(step as f64)).sqrt();
        [factor, beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps, shrink, rate, root]
    }
}

/// One step with the numbers of [`AdamW::numbers`], with `g` as `factor` times the gradient, see [`sgd`]:
/// `m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
/// p = p (1 - lr weight_decay) - lr (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)`.
/// All tensors have the same length, f32 or f64; updates in place.
pub fn adamw(
    compute: &Compute,
    numbers: StepNumbers<'_, 9>,
    params: &Tensor,
    grads: &Tensor,
    first: &Tensor,
    second: &Tensor,
) -> Result<()> {
    let op = Op::new("adamw").elementwise([16, params.num_elems()]);
    dispatch!(op.name, params.dtype(), T: f32 | f64 => {
        let shape = params.shape();
        let (here, in_memory) = numbers.parts::<T>();
        let operands = (
            update::<T>("parameters", params, shape),
            read::<T>("gradients", grads, shape),
            update::<T>("first moment", first, shape),
            update::<T>("second moment", second, shape),
            in_memory,
        );
        let n = params.num_elems();
        compute.launch_with_card(op, operands, move |cpu, (p, g, m, v, of)| {
            let factors = found(here, of);
            let len = p.len();
            let moments = batches(cpu, m, 1, len).into_iter().zip(batches(cpu, v, 1, len));
            let parts = batches(cpu, p, 1, len).into_iter().zip(moments).collect();
            cpu.threads.for_each(parts, |((first, p), ((_, m), (_, v)))| {
                let g = &g[first..first + p.len()];
                vectorized!(cpu.simd, adamw_of::<T>, factors, p, g, m, v);
            });
            Ok(())
        }, move |card, (p, g, m, v, of)| {
            let (grid, n) = (Grid::fours(n), n as u64);
            // SAFETY: all have `n` elements, and the numbers are nine.
            unsafe {
                match of {
                    Some(of) => card.launch(CARD.of::<T>("adamw_from"), (p, g, m, v, of, n), grid),
                    None => card.launch(CARD.of::<T>("adamw"), (p, g, m, v, here, n), grid),
                }
            }
        })
    })
}

#[inline(always)]
fn adamw_of<T: Real>(factors: [T; 9], p: &mut [T], g: &[T], m: &mut [T], v: &mut [T]) {
    let [factor, beta1, rest1, beta2, rest2, eps, shrink, rate, root] = factors;
    for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        let g = factor * *g;
        *m = beta1 * *m + rest1 * g;
        *v = beta2 * *v + rest2 * (g * g);
        *p = *p * shrink - rate * *m / ((*v).sqrt() * root + eps);
    }
}
