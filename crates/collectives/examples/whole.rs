//! Data-parallel training on one page: ranks, a model, forward, backward, the all-reduce of gradients, and the step.
//!
//!     cargo run --release -p paceline-collectives --example whole
//!
//! The ranks are threads of this process. Each has a copy of the model and its own part of every batch. After the backward
//! pass the ranks average their gradients, so all take the same step and their copies stay equal. This is all that data
//! parallelism is; everything else in this project makes it faster, smaller, or visible.
//!
//! The model learns which points of the unit square lie within a circle. It has two layers,
//! `hidden = tanh(w1 point + b1)` and `score = w2 hidden + b2`: a point counts as inside if its score is positive.

use std::thread;

use paceline_collectives::{CollectiveError, Group, ReduceOp};

const STEPS: usize = 600;
/// Samples of all ranks together in a step.
const BATCH: usize = 64;
const LEARNING_RATE: f32 = 1.0;

const HIDDEN: usize = 16;
/// All parameters lie in one vector, so that one all-reduce takes all gradients: w1 (hidden, 2), b1 (hidden), w2 (hidden), b2 (1).
const PARAMS: usize = 4 * HIDDEN + 1;
const B1: usize = 2 * HIDDEN;
const W2: usize = 3 * HIDDEN;
const B2: usize = 4 * HIDDEN;

fn main() -> Result<(), CollectiveError> {
    for world_size in [1, 2, 4] {
        // A group is what a rank knows of the others: here one for each thread.
        let ranks: Vec<_> = Group::threads(world_size)
            .into_iter()
            .map(|group| thread::spawn(move || train(group)))
            .collect();
        let mut models = Vec::new();
        for rank in ranks {
            models.push(rank.join().expect("a rank does not panic")?);
        }
        assert!(models.iter().all(|model| *model == models[0]), "the copies differ");
        let (loss, accuracy) = evaluate(&models[0]);
        println!("world size {world_size}: loss {loss:.4}, accuracy {accuracy:.3}");
    }
    Ok(())
}

/// Trains on one rank. Returns its copy of the model.
fn train(group: Group) -> Result<Vec<f32>, CollectiveError> {
    let (rank, world_size) = (group.rank(), group.world_size());
    let mut params = initial_params();
    for step in 0..STEPS {
        // This rank's part of the batch. No other rank has these samples.
        let samples = BATCH / world_size;
        let first = step * BATCH + rank * samples;

        let mut gradients = vec![0.0; PARAMS];
        for number in first..first + samples {
            let (point, is_inside) = sample(number);
            let (hidden, score) = forward(&params, point);
            // The loss is the negative logarithm of the probability of the right answer. Its derivative with respect to the score:
            let d_score = (sigmoid(score) - f32::from(is_inside)) / samples as f32;
            backward(&params, point, &hidden, d_score, &mut gradients);
        }

        // Each rank has the mean over its own samples. The mean of these is that over the whole batch.
        group.all_reduce_slice(&mut gradients, ReduceOp::Mean)?;

        for (param, gradient) in params.iter_mut().zip(&gradients) {
            *param -= LEARNING_RATE * gradient;
        }
    }
    Ok(params)
}

/// The hidden layer and the score of a point.
fn forward(params: &[f32], point: [f32; 2]) -> ([f32; HIDDEN], f32) {
    let mut hidden = [0.0; HIDDEN];
    let mut score = params[B2];
    for (at, hidden) in hidden.iter_mut().enumerate() {
        let weighted = params[2 * at] * point[0] + params[2 * at + 1] * point[1];
        *hidden = (weighted + params[B1 + at]).tanh();
        score += params[W2 + at] * *hidden;
    }
    (hidden, score)
}

/// Adds the gradients of one sample, by the chain rule from the score back to the first layer.
fn backward(params: &[f32], point: [f32; 2], hidden: &[f32], d_score: f32, gradients: &mut [f32]) {
    gradients[B2] += d_score;
    for (at, hidden) in hidden.iter().enumerate() {
        gradients[W2 + at] += d_score * hidden;
        // The derivative of tanh is 1 - tanh².
        let d_weighted = d_score * params[W2 + at] * (1.0 - hidden * hidden);
        gradients[B1 + at] += d_weighted;
        gradients[2 * at] += d_weighted * point[0];
        gradients[2 * at + 1] += d_weighted * point[1];
    }
}

/// The same numbers on every rank, so that all copies begin equal. They differ within a copy: with equal weights, all hidden
/// values would learn the same.
fn initial_params() -> Vec<f32> {
    (0..PARAMS).map(|at| 4.0 * fraction(at, 0.618_034) - 2.0).collect()
}

/// Point number `number`, and whether it lies within the circle, which covers half of the square.
fn sample(number: usize) -> ([f32; 2], bool) {
    let point = [fraction(number, 0.754_877_7), fraction(number, 0.569_840_3)];
    let [x, y] = point.map(|of| of - 0.5);
    (point, x * x + y * y < 0.5 / std::f32::consts::PI)
}

/// The fractional part of `number * step`: spread evenly over 0 to 1.
fn fraction(number: usize, step: f64) -> f32 {
    (number as f64 * step).fract() as f32
}

fn sigmoid(score: f32) -> f32 {
    1.0 / (1.0 + (-score).exp())
}

/// Mean loss and accuracy over points that no rank has trained on.
fn evaluate(params: &[f32]) -> (f32, f32) {
    const POINTS: usize = 1000;
    let (mut loss, mut correct) = (0.0, 0);
    for number in (STEPS * BATCH..).take(POINTS) {
        let (point, is_inside) = sample(number);
        let score = forward(params, point).1;
        loss -= sigmoid(if is_inside { score } else { -score }).ln();
        correct += usize::from((score > 0.0) == is_inside);
    }
    (loss / POINTS as f32, correct as f32 / POINTS as f32)
}
