//! Chooses a token from the logits of all tokens. This module does not know where the logits come from.

use paceline_memory::{DType, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{ModelError, Result};

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sampling {
    /// The token with the largest logit; the first one of equals.
    Greedy,
    /// A token at random, with the probabilities `softmax(logits / temperature)`.
    Random {
        /// Above zero. Below one, likely tokens become likelier.
        temperature: f64,
        /// Only that many tokens, those with the largest logits, can be chosen.
        top_k: Option<usize>,
        /// Only the likeliest tokens that together have this probability can be chosen: as few as reach it. Above zero, at
        /// most one. Source: Holtzman and others, The Curious Case of Neural Text Degeneration (2019).
        top_p: Option<f64>,
        /// Decides the choices: the same seed and the same logits give the same tokens.
        seed: u64,
    },
}

/// Chooses one token after the other.
#[derive(Debug)]
pub struct TokenSampler {
    sampling: Sampling,
    repetition_penalty: f64,
    rng: ChaCha8Rng,
}

impl TokenSampler {
    /// Errors if the temperature is not a number above zero, or if no token could be chosen.
    pub fn new(sampling: Sampling) -> Result<Self> {
        let refused = |problem: String| Err(ModelError::Config(problem));
        let seed = match sampling {
            Sampling::Greedy => 0,
            Sampling::Random { temperature, .. }
                if !(temperature > 0.0 && temperature.is_finite()) =>
            {
                return refused(format!(
                    "the temperature is {temperature}, and must be above zero"
                ));
            }
            Sampling::Random { top_k: Some(0), .. } => {
                return refused("the best 0 tokens leave none to choose".into());
            }
            Sampling::Random { top_p: Some(top_p), .. } if !(top_p > 0.0 && top_p <= 1.0) => {
                return refused(format!(
                    "the probability {top_p} of the likeliest tokens is not above zero and at most one"
                ));
            }
            Sampling::Random { seed, .. } => seed,
        };
        Ok(Self { sampling, repetition_penalty: 1.0, rng: ChaCha8Rng::seed_from_u64(seed) })
    }

    /// Makes tokens that occurred less likely: logits above zero are divided by `penalty`, and the others are multiplied by
    /// it. 1 by default. Errors if it is not a number above zero. Source: Keskar and others, CTRL (2019).
    pub fn with_repetition_penalty(self, penalty: f64) -> Result<Self> {
        if penalty > 0.0 && penalty.is_finite() {
            Ok(Self { repetition_penalty: penalty, ..self })
        } else {
            Err(ModelError::Config(format!(
                "the repetition penalty is {penalty}, and must be above zero"
            )))
        }
    }

    /// The next token after the tokens `before`. `logits` has an element of f32 or f64 for each token, which must be finite.
    pub fn choose(&mut self, logits: &Tensor, before: &[u32]) -> Result<u32> {
        let mut logits: Vec<f64> = match logits.dtype() {
            DType::F64 => logits.read::<f64>()?.to_vec(),
            _ => logits.read::<f32>()?.iter().map(|logit| f64::from(*logit)).collect(),
        };
        if let Some(token) = logits.iter().position(|logit| !logit.is_finite()) {
            return Err(ModelError::Logit { token, value: logits[token] });
        }
        let (penalty, mut seen) = (self.repetition_penalty, before.to_vec());
        // Each token once, however often it occurred.
        seen.sort_unstable();
        seen.dedup();
        for token in seen.iter().filter(|_| penalty != 1.0) {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
        // Larger logits first, and among equals the first token: a strict order.
        let order = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        let best = (0..logits.len()).min_by(order);
        let best = best.ok_or_else(|| ModelError::Config("there are no tokens".into()))?;
        let Sampling::Random { temperature, top_k, top_p, .. } = self.sampling else {
            return Ok(best as u32);
        };
        let mut tokens: Vec<usize> = (0..logits.len()).collect();
        if let Some(top_k) = top_k.filter(|top_k| *top_k < tokens.len()) {
            tokens.select_nth_unstable_by(top_k, order);
            tokens.truncate(top_k);
            tokens.sort_unstable();
        }
        let weight = |token: &usize| ((logits[*token] - logits[best]) / temperature).exp();
        if let Some(top_p) = top_p.filter(|p| *p < 1.0) {
            tokens.sort_unstable_by(order);
            let mut missing = top_p * tokens.iter().map(weight).sum::<f64>();
            let is_needed = |token: &&usize| {
                let was_missing = missing > 0.0;
                missing -= weight(token);
                was_missing
            };
            let count = tokens.iter().take_while(is_needed).count();
            tokens.truncate(count);
            tokens.sort_unstable();
        }
        let mut left = self.rng.random::<f64>() * tokens.iter().map(weight).sum::<f64>();
        for token in &tokens {
            left -= weight(token);
            if left < 0.0 {
                return Ok(*token as u32);
            }
        }
        // Only rounding gets here.
        Ok(best as u32)
    }
}
