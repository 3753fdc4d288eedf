//! Optimizer steps over flat storage, in one pass.

use paceline_memory::{DType, Device, Tensor};

use crate::compute::batches;
use crate::error::expect_shape;
use crate::meta::{self, MetaScratch};
use crate::simd::multiversion;
use crate::{Compute, KernelError, Real, Result};

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

/// `g' = g + weight_decay * p; v = momentum * v + g'; p -= lr * v`, without `v` if there is no
/// momentum (`velocity` is `None`). All tensors have the same length, f32 or f64; updates in place.
pub fn sgd(
    compute: &Compute,
    config: &Sgd,
    params: &Tensor,
    grads: &Tensor,
    velocity: Option<&Tensor>,
) -> Result<()> {
    let _time = compute.time("sgd", [params]);
    let op = "sgd";
    let shape = params.shape();
    expect_shape(op, "gradients", grads.shape(), shape)?;
    if let Some(velocity) = velocity {
        expect_shape(op, "velocity", velocity.shape(), shape)?;
    }
    let len = shape.num_elems();
    match compute.device_of(op, [params, grads].into_iter().chain(velocity))? {
        Device::Cpu => match params.dtype() {
            DType::F32 => {
                let factors = SgdFactors::<f32>::new(config);
                let g = grads.read::<f32>()?;
                let mut p = params.write::<f32>()?;
                let mut v = velocity.map(|v| v.write::<f32>()).transpose()?;
                let v: &mut [f32] = v.as_deref_mut().unwrap_or_default();
                let v_elems = usize::from(!v.is_empty());
                let items = batches(compute, &mut p, 1, len)
                    .into_iter()
                    .zip(batches(compute, v, v_elems, len))
                    .collect();
                compute.threads.for_each(items, |((first, p), (_, v))| {
                    let g = &g[first..first + p.len()];
                    if v.is_empty() {
                        sgd_plain_f32(compute.simd, factors, p, g);
                    } else {
                        sgd_momentum_f32(compute.simd, factors, p, g, v);
                    }
                    Ok(())
                })
            }
            DType::F64 => {
                let factors = SgdFactors::<f64>::new(config);
                let g = grads.read::<f64>()?;
                let mut p = params.write::<f64>()?;
                match velocity {
                    Some(v) => sgd_momentum_body(factors, &mut p, &g, &mut v.write::<f64>()?),
                    None => sgd_plain_body(factors, &mut p, &g),
                }
                Ok(())
            }
            dtype => Err(KernelError::DType { op, dtype }),
        },
        Device::Meta => {
            let dtype = meta::float(op, params)?;
            let pretended = MetaScratch::new(compute, op).reads(dtype, [grads])?;
            pretended.writes(dtype, [params].into_iter().chain(velocity))?;
            Ok(())
        }
    }
}

#[derive(Clone, Copy)]
struct SgdFactors<T> {
    lr: T,
    momentum: T,
    weight_decay: T,
}

impl<T: Real> SgdFactors<T> {
    fn new(config: &Sgd) -> Self {
        Self {
            lr: T::from_f64(config.lr),
            momentum: T::from_f64(config.momentum),
            weight_decay: T::from_f64(config.weight_decay),
        }
    }
}

multiversion! {
    fn sgd_plain_f32(factors: SgdFactors<f32>, p: &mut [f32], g: &[f32]) = sgd_plain_body
}

#[inline(always)]
fn sgd_plain_body<T: Real>(factors: SgdFactors<T>, p: &mut [T], g: &[T]) {
    let SgdFactors { lr, weight_decay, .. } = factors;
    for (p, g) in p.iter_mut().zip(g) {
        *p = *p - lr * (*g + weight_decay * *p);
    }
}

multiversion! {
    fn sgd_momentum_f32(
        factors: SgdFactors<f32>,
        p: &mut [f32],
        g: &[f32],
        v: &mut [f32],
    ) = sgd_momentum_body
}

#[inline(always)]
fn sgd_momentum_body<T: Real>(factors: SgdFactors<T>, p: &mut [T], g: &[T], v: &mut [T]) {
    let SgdFactors { lr, momentum, weight_decay } = factors;
    for ((p, g), v) in p.iter_mut().zip(g).zip(v) {
        *v = momentum * *v + (*g + weight_decay * *p);
        *p = *p - lr * *v;
    }
}

/// One step, the `step`-th counted from 1:
/// `m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
/// p = p (1 - lr weight_decay) - lr (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)`.
/// All tensors have the same length, f32 or f64; updates in place.
pub fn adamw(
    compute: &Compute,
    config: &AdamW,
    step: u64,
    params: &Tensor,
    grads: &Tensor,
    first: &Tensor,
    second: &Tensor,
) -> Result<()> {
    let _time = compute.time("adamw", [params]);
    let op = "adamw";
    let shape = params.shape();
    expect_shape(op, "gradients", grads.shape(), shape)?;
    expect_shape(op, "first moment", first.shape(), shape)?;
    expect_shape(op, "second moment", second.shape(), shape)?;
    let len = shape.num_elems();
    match compute.device_of(op, [params, grads, first, second])? {
        Device::Cpu => match params.dtype() {
            DType::F32 => {
                let factors = AdamWFactors::<f32>::new(config, step);
                let g = grads.read::<f32>()?;
                let (mut p, mut m, mut v) =
                    (params.write::<f32>()?, first.write::<f32>()?, second.write::<f32>()?);
                let moments = batches(compute, &mut m, 1, len)
                    .into_iter()
                    .zip(batches(compute, &mut v, 1, len));
                let items = batches(compute, &mut p, 1, len).into_iter().zip(moments).collect();
                compute.threads.for_each(items, |((first, p), ((_, m), (_, v)))| {
                    adamw_f32(compute.simd, factors, p, &g[first..first + p.len()], m, v);
                    Ok(())
                })
            }
            DType::F64 => {
                let factors = AdamWFactors::<f64>::new(config, step);
                let (mut p, g) = (params.write()?, grads.read()?);
                adamw_body(factors, &mut p, &g, &mut first.write()?, &mut second.write()?);
                Ok(())
            }
            dtype => Err(KernelError::DType { op, dtype }),
        },
        Device::Meta => {
            let dtype = meta::float(op, params)?;
            let pretended = MetaScratch::new(compute, op).reads(dtype, [grads])?;
            pretended.writes(dtype, [params, first, second])?;
            Ok(())
        }
    }
}

#[derive(Clone, Copy)]
struct AdamWFactors<T> {
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
    fn new(config: &AdamW, step: u64) -> Self {
        let AdamW { lr, beta1, beta2, eps, weight_decay } = *config;
        Self {
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
    fn adamw_f32(
        factors: AdamWFactors<f32>,
        p: &mut [f32],
        g: &[f32],
        m: &mut [f32],
        v: &mut [f32],
    ) = adamw_body
}

#[inline(always)]
fn adamw_body<T: Real>(f: AdamWFactors<T>, p: &mut [T], g: &[T], m: &mut [T], v: &mut [T]) {
    for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        *m = f.beta1 * *m + f.rest1 * *g;
        *v = f.beta2 * *v + f.rest2 * (*g * *g);
        *p = *p * f.shrink - f.rate * *m / ((*v).sqrt() * f.root + f.eps);
    }
}
