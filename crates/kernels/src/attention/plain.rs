//! Attention head by head and query by query, as the formulas say: for f64 tensors, and for tests of the fast form.
//!
//! Input and output: slices of the shapes that [`attention`](super) states. This file does not know tiles, threads or
//! vector instructions.

use super::AttentionSpec;
use crate::Real;
use crate::rotary::{turn, turn_back};

/// One head of one row of the batch: its real tokens, and where its queries, keys and values are.
struct AttentionHead<'a, T> {
    spec: &'a AttentionSpec,
    qkv: &'a [T],
    angles: &'a [T],
    row: usize,
    head: usize,
    len: usize,
}

impl<T: Real> AttentionHead<'_, T> {
    /// The columns of queries, keys and values.
    fn columns(&self) -> [usize; 3] {
        let AttentionSpec { heads, kv_heads, head_dim, .. } = *self.spec;
        let kv_head = self.head / self.spec.group();
        [self.head, heads + kv_head, heads + kv_heads + kv_head].map(|head| head * head_dim)
    }

    /// Where a token's elements from `column` on are in qkv.
    fn at(&self, token: usize, column: usize) -> std::ops::Range<usize> {
        let at = (self.row * self.spec.seq + token) * self.spec.qkv_shape()[1] + column;
        at..at + self.spec.head_dim
    }

    /// Where a token's elements are in the output.
    fn output_at(&self, token: usize) -> std::ops::Range<usize> {
        let AttentionSpec { seq, heads, head_dim, .. } = *self.spec;
        let at = ((self.row * seq + token) * heads + self.head) * head_dim;
        at..at + head_dim
    }

    fn log_sum_at(&self, token: usize) -> usize {
        (self.row * self.spec.heads + self.head) * self.spec.seq + token
    }

    fn angles(&self, token: usize) -> &[T] {
        &self.angles[token * self.spec.head_dim..][..self.spec.head_dim]
    }

    /// The rotated elements from `column` on of all real tokens, times `factor`.
    fn rotated(&self, column: usize, factor: T) -> Vec<Vec<T>> {
        let rotated = |token| {
            let mut to = vec![T::default(); self.spec.head_dim];
            turn(&self.qkv[self.at(token, column)], self.angles(token), factor, &mut to);
            to
        };
        (0..self.len).map(rotated).collect()
    }
}

fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).fold(T::default(), |sum, (a, b)| sum + *a * *b)
}

/// `to += factor * from`
fn add<T: Real>(factor: T, from: &[T], to: &mut [T]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * *from);
}

/// Every head of every row.
fn heads<'a, T: Real>(
    spec: &'a AttentionSpec,
    qkv: &'a [T],
    lengths: &'a [i64],
    angles: &'a [T],
) -> impl Iterator<Item = AttentionHead<'a, T>> {
    let rows = lengths.iter().enumerate();
    rows.flat_map(move |(row, &len)| {
        let len = len as usize;
        (0..spec.heads).map(move |head| AttentionHead { spec, qkv, angles, row, head, len })
    })
}

/// See [`forward`](super::forward()).
pub fn forward<T: Real>(
    spec: &AttentionSpec,
    qkv: &[T],
    lengths: &[i64],
    angles: &[T],
    output: &mut [T],
    log_sums: &mut [T],
) {
    output.fill(T::default());
    log_sums.fill(T::default());
    for head in heads(spec, qkv, lengths, angles) {
        let [q, k, v] = head.columns();
        let (q, k) =
            (head.rotated(q, T::from_f64(spec.scale())), head.rotated(k, T::from_f64(1.0)));
        for i in 0..head.len {
            let scores: Vec<T> = k[..=i].iter().map(|k| dot(&q[i], k)).collect();
            let largest =
                scores.iter().fold(scores[0], |most, s| if *s > most { *s } else { most });
            let mut sum = T::default();
            scores.iter().for_each(|s| sum += (*s - largest).exp());
            let log_sum = largest + sum.ln();
            let output = &mut output[head.output_at(i)];
            for (j, s) in scores.iter().enumerate() {
                add((*s - log_sum).exp(), &qkv[head.at(j, v)], output);
            }
            log_sums[head.log_sum_at(i)] = log_sum;
        }
    }
}

/// See [`backward`](super::backward()); the results of the forward pass, and their gradient, are output, log_sums and
/// d_output.
pub fn backward<T: Real>(
    spec: &AttentionSpec,
    qkv: &[T],
    lengths: &[i64],
    angles: &[T],
    (output, log_sums, d_output): (&[T], &[T], &[T]),
    d_qkv: &mut [T],
) {
    d_qkv.fill(T::default());
    let (one, scale) = (T::from_f64(1.0), T::from_f64(spec.scale()));
    for head in heads(spec, qkv, lengths, angles) {
        let columns @ [q, k, v] = head.columns();
        let (q, k) = (head.rotated(q, scale), head.rotated(k, one));
        // Gradients of the rotated queries and keys.
        let zeros = || vec![vec![T::default(); spec.head_dim]; head.len];
        let (mut dq, mut dk) = (zeros(), zeros());
        for i in 0..head.len {
            let d_output = &d_output[head.output_at(i)];
            let d = dot(d_output, &output[head.output_at(i)]);
            for j in 0..=i {
                let p = (dot(&q[i], &k[j]) - log_sums[head.log_sum_at(i)]).exp();
                add(p, d_output, &mut d_qkv[head.at(j, v)]);
                let ds = p * (dot(d_output, &qkv[head.at(j, v)]) - d);
                add(ds * scale, &k[j], &mut dq[i]);
                add(ds, &q[i], &mut dk[j]);
            }
        }
        let mut back = vec![T::default(); spec.head_dim];
        for (rotated, column) in [(dq, columns[0]), (dk, columns[1])] {
            for (token, rotated) in rotated.iter().enumerate() {
                turn_back(rotated, head.angles(token), one, &mut back);
                add(one, &back, &mut d_qkv[head.at(token, column)]);
            }
        }
    }
}
