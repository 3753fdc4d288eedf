//! Tensors that lie twice: in the processor's memory and in that of a card.
#![allow(dead_code, reason = "each file of tests uses a part")]

use paceline_cuda::Card;
use paceline_emulated_card::for_tests::is_ready;
use paceline_kernels::{Compute, Result};
use paceline_memory::{Accelerator, Allocator, Category, DType, Tensor};

use crate::common::{values, write};

/// The processor and a card.
pub struct Pair {
    cpu: Compute,
    /// The one on the card.
    pub card: Compute,
}

/// A tensor on both.
pub struct Both {
    cpu: Tensor,
    /// The one on the card.
    pub card: Tensor,
}

impl Both {
    /// The number of elements.
    pub fn len(&self) -> usize {
        self.cpu.num_elems()
    }
}

/// How far a result of the card may be off.
#[derive(Clone, Copy, Debug)]
pub enum Promise {
    /// Not at all.
    Bits,
    /// The difference, relative to the largest element.
    Within(f64),
}

impl Pair {
    /// `None`, with the reason printed, if there is no card or no compiler.
    pub fn new() -> Option<Self> {
        let card = is_ready().then(|| Card::open(0).unwrap())?;
        let stream = Accelerator::cuda(card).stream("compute").unwrap();
        Some(Self {
            cpu: Compute::new(1, Allocator::new()).unwrap(),
            card: Compute::new(1, Allocator::on(&stream)).unwrap(),
        })
    }

    /// The same with products on tensor cores.
    pub fn with_tf32(self) -> Self {
        Self { card: self.card.with_tf32(), ..self }
    }

    /// Pseudorandom numbers around zero, the same on both.
    pub fn random(&self, dtype: DType, shape: &[usize], seed: u64) -> Both {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let values: Vec<f64> = (0..shape.iter().product())
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
            })
            .collect();
        self.of(dtype, shape, &values)
    }

    /// NaN everywhere, or the largest integer, so that an element that is not written shows.
    pub fn poisoned(&self, dtype: DType, shape: &[usize]) -> Both {
        self.of(dtype, shape, &vec![f64::NAN; shape.iter().product()])
    }

    /// These values, rounded to the type.
    pub fn of(&self, dtype: DType, shape: &[usize], values: &[f64]) -> Both {
        let cpu = self.cpu.allocator.tensor(dtype, shape, Category::Data).unwrap();
        write(&cpu, values);
        let host = self.card.host.tensor(dtype, shape, Category::Data).unwrap();
        write(&host, values);
        let card = self.card.allocator.tensor(dtype, shape, Category::Data).unwrap();
        self.card.copy(&host, &card).unwrap();
        Both { cpu, card }
    }

    /// The same operation on both.
    pub fn run<const N: usize>(
        &self,
        op: impl Fn(&Compute, [&Tensor; N]) -> Result<()>,
        tensors: [&Both; N],
    ) {
        op(&self.cpu, tensors.map(|both| &both.cpu)).unwrap();
        op(&self.card, tensors.map(|both| &both.card)).unwrap();
    }

    /// What an operation makes of a tensor, on both.
    pub fn both(&self, x: &Both, op: impl Fn(&Compute, &Tensor) -> Result<Tensor>) -> Both {
        Both { cpu: op(&self.cpu, &x.cpu).unwrap(), card: op(&self.card, &x.card).unwrap() }
    }

    /// Tensors one after the other.
    pub fn joined(&self, parts: &[Both]) -> Both {
        let values: Vec<f64> = parts.iter().flat_map(|part| values(&part.cpu)).collect();
        self.of(parts[0].cpu.dtype(), &[values.len()], &values)
    }

    /// An operation on the card alone.
    pub fn run_on_card<const N: usize>(
        &self,
        op: impl Fn(&Compute, [&Tensor; N]) -> Result<()>,
        tensors: [&Both; N],
    ) {
        op(&self.card, tensors.map(|both| &both.card)).unwrap();
    }

    /// The elements on the processor.
    pub fn on_processor(&self, both: &Both) -> Vec<f64> {
        values(&both.cpu)
    }

    /// The elements on the card.
    pub fn on_card(&self, both: &Both) -> Vec<f64> {
        self.card.synchronize().unwrap();
        values(&both.card.to_host().unwrap())
    }

    /// Panics with the first element that has other bits.
    #[track_caller]
    pub fn same_bits<const N: usize>(&self, tensors: [&Both; N]) {
        for both in tensors {
            self.compare(both, Promise::Bits);
        }
    }

    /// Panics with the first element that is further off than promised.
    #[track_caller]
    pub fn compare(&self, both: &Both, promise: Promise) {
        let (want, got) = (values(&both.cpu), self.on_card(both));
        let largest = want.iter().fold(0f64, |most, x| most.max(x.abs()));
        for (at, (want, got)) in want.iter().zip(&got).enumerate() {
            let is_kept = match promise {
                Promise::Bits => want.to_bits() == got.to_bits() || (want.is_nan() && got.is_nan()),
                Promise::Within(part) => (want - got).abs() <= part * largest,
            };
            let dtype = both.cpu.dtype();
            assert!(
                is_kept,
                "{dtype}, element {at}: {got} on the card, {want}; promised {promise:?}"
            );
        }
    }
}
