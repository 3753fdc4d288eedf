//! Optimizer steps over flat storage, in one pass.

use paceline_cuda::Grid;
use paceline_cuda::kernel::Out;
use paceline_memory::Tensor;

use crate::card::optimizer as kernels;
use crate::compute::batches;
use crate::real::for_real;
use crate::simd::multiversion;
use crate::{Compute, Op, Processor, Real, Result, read, update};

/// Stochastic gradient descent, as in PyTorch's `SGD` without dampening and Nesterov.
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

/// `g' = factor * g + weight_decay * p; v = momentum * v + g'; p -= lr * v`, without `v` if there is no momentum (`velocity`
/// is `None`). The factor stands beside the gradients; it is 1 unless they are scaled. All tensors have the same length, f32 or f64; updates in place.
pub fn sgd(
    compute: &Compute,
    config: &Sgd,
    params: &Tensor,
    (grads, factor): (&Tensor, f64),
    velocity: Option<&Tensor>,
) -> Result<()> {
    let op = Op::new("sgd");
    for_real!(op.name, params.dtype(), T => {
        let shape = params.shape();
        let operands = (
            update::<T>("parameters", params, shape),
            read::<T>("gradients", grads, shape),
            velocity.map(|velocity| update::<T>("velocity", velocity, shape)),
        );
        let factors = SgdFactors::<T>::new(config, factor);
        let n = params.num_elems();
        let body = move |cpu: &Processor, (p, g, v): (&mut [T], &[T], Option<&mut [T]>)| {
            let len = p.len();
            let v: &mut [T] = v.unwrap_or_default();
            let v_elems = usize::from(!v.is_empty());
            let parts = batches(cpu, p, 1, len).into_iter().zip(batches(cpu, v, v_elems, len));
            cpu.threads.for_each(parts.collect(), |((first, p), (_, v))| {
                let g = &g[first..first + p.len()];
                if v.is_empty() {
                    sgd_plain::<T>(cpu.simd, factors, p, g);
                } else {
                    sgd_momentum::<T>(cpu.simd, factors, p, g, v);
                }
            });
            Ok(())
        };
        compute.launch_with_card(op, operands, body, move |card, (p, g, v)| {
            let (v, SgdFactors { factor, lr, momentum, weight_decay }) = (v.unwrap_or(Out::NONE), factors);
            let call = kernels::sgd(p, g, v, factor, lr, momentum, weight_decay, n as u64)?;
            // SAFETY: all that are there have `n` elements.
            unsafe { card.launch(call, Grid::elements(n)) }
        })
    })
}

#[derive(Clone, Copy)]
struct SgdFactors<T> {
    /// Of the gradient.
    factor: T,
    lr: T,
    momentum: T,
    weight_decay: T,
}

impl<T: Real> SgdFactors<T> {
    fn new(config: &Sgd, factor: f64) -> Self {
        Self {
            factor: T::from_f64(factor),
            lr: T::from_f64(config.lr),
            momentum: T::from_f64(config.momentum),
            weight_decay: T::from_f64(config.weight_decay),
        }
    }
}

multiversion! {
    fn sgd_plain<T: Real>(factors: SgdFactors<T>, p: &mut [T], g: &[T]) = sgd_plain_body
}

#[inline(always)]
fn sgd_plain_body<T: Real>(factors: SgdFactors<T>, p: &mut [T], g: &[T]) {
    let SgdFactors { factor, lr, weight_decay, .. } = factors;
    for (p, g) in p.iter_mut().zip(g) {
        *p = *p - lr * (factor * *g + weight_decay * *p);
    }
}

multiversion! {
    fn sgd_momentum<T: Real>(
        factors: SgdFactors<T>,
        p: &mut [T],
        g: &[T],
        v: &mut [T],
    ) = sgd_momentum_body
}

#[inline(always)]
fn sgd_momentum_body<T: Real>(factors: SgdFactors<T>, p: &mut [T], g: &[T], v: &mut [T]) {
    let SgdFactors { factor, lr, momentum, weight_decay } = factors;
    for ((p, g), v) in p.iter_mut().zip(g).zip(v) {
        *v = momentum * *v + (factor * *g + weight_decay * *p);
        *p = *p - lr * *v;
    }
}

/// One step, the `step`-th counted from 1, with `g` as `factor` times the gradient, see [`sgd`]:
/// `m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
/// p = p (1 - lr weight_decay) - lr (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)`.
/// All tensors have the same length, f32 or f64; updates in place.
pub fn adamw(
    compute: &Compute,
    config: &AdamW,
    step: u64,
    params: &Tensor,
    (grads, factor): (&Tensor, f64),
    first: &Tensor,
    second: &Tensor,
) -> Result<()> {
    let op = Op::new("adamw");
    for_real!(op.name, params.dtype(), T => {
        let shape = params.shape();
        let operands = (
            update::<T>("parameters", params, shape),
            read::<T>("gradients", grads, shape),
            update::<T>("first moment", first, shape),
            update::<T>("second moment", second, shape),
        );
        let factors = AdamWFactors::<T>::new(config, step, factor);
        let n = params.num_elems();
        let body = move |cpu: &Processor, (p, g, m, v): AdamWSlices<'_, T>| {
            let len = p.len();
            let moments = batches(cpu, m, 1, len).into_iter().zip(batches(cpu, v, 1, len));
            let parts = batches(cpu, p, 1, len).into_iter().zip(moments).collect();
            cpu.threads.for_each(parts, |((first, p), ((_, m), (_, v)))| {
                adamw_of::<T>(cpu.simd, factors, p, &g[first..first + p.len()], m, v);
            });
            Ok(())
        };
        compute.launch_with_card(op, operands, body, move |card, (p, g, m, v)| {
            let AdamWFactors { factor, beta1, rest1, beta2, rest2, eps, shrink, rate, root } = factors;
            let n_words = n as u64;
            let call = kernels::adamw(
                p, g, m, v, factor, beta1, rest1, beta2, rest2, eps, shrink, rate, root, n_words,
            )?;
            // SAFETY: all have `n` elements.
            unsafe { card.launch(call, Grid::elements(n)) }
        })
    })
}

/// Parameters, gradients and both moments.
type AdamWSlices<'a, T> = (&'a mut [T], &'a [T], &'a mut [T], &'a mut [T]);

#[derive(Clone, Copy)]
struct AdamWFactors<T> {
    /// Of the gradient.
    factor: T,
    beta1: T,
    rest1: T,
    beta2: T,
    rest2: T,
    eps: T,
    shrink: T,
    /// Learning rate over the bias correction of the first moment.
    rate: T,
    /// One over the square root of the bias correction of the second moment.
    root: T,
}

impl<T: Real> AdamWFactors<T> {
    fn new(config: &AdamW, step: u64, factor: f64) -> Self {
        let AdamW { lr, beta1, beta2, eps, weight_decay } = *config;
        Self {
            factor: T::from_f64(factor),
            beta1: T::from_f64(beta1),
            rest1: T::from_f64(1.0 - beta1),
            beta2: T::from_f64(beta2),
            rest2: T::from_f64(1.0 - beta2),
            eps: T::from_f64(eps),
            shrink: T::from_f64(1.0 - lr * weight_decay),
            rate: T::from_f64(lr / (1.0 - beta1.powf(step as f64))),
            root: T::from_f64(1.0 / (1.0 - beta2.powf(step as f64)).sqrt()),
        }
    }
}

multiversion! {
    fn adamw_of<T: Real>(
        factors: AdamWFactors<T>,
        p: &mut [T],
        g: &[T],
        m: &mut [T],
        v: &mut [T],
    ) = adamw_body
}

#[inline(always)]
fn adamw_body<T: Real>(f: AdamWFactors<T>, p: &mut [T], g: &[T], m: &mut [T], v: &mut [T]) {
    for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        let g = f.factor * *g;
        *m = f.beta1 * *m + f.rest1 * g;
        *v = f.beta2 * *v + f.rest2 * (g * g);
        *p = *p * f.shrink - f.rate * *m / ((*v).sqrt() * f.root + f.eps);
    }
}
