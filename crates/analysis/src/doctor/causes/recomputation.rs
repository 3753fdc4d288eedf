//! The backward pass computes parts of the forward pass again (activation checkpointing), although the card has memory for them.
//!
//! Seen: work of `CheckpointFunctionBackward`, or of operators that only a forward pass calls, within autograd's functions. If the trace
//! gives the memory of the card, at least three tenths of it must be free. Taken away: at most all of this work. At least half, because some layers may
//! have to stay as they are; nothing, if the trace does not give the memory.

use super::*;

/// Operators that PyTorch's own functions of autograd do not call, without `aten::`. Functions of other libraries may.
const FORWARD: &str = "batch_norm conv2d dropout embedding gelu group_norm layer_norm linear max_pool2d relu relu_ rms_norm \
    scaled_dot_product_attention silu softmax";
const EVALUATED: &str = "autograd::engine::evaluate_function: ";
const CHECKPOINT: &str = "CheckpointFunctionBackward";
/// With less of its memory free, a card needs what is computed again.
const FREE: f64 = 0.3;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "recomputation",
    title: "Activations are computed again although memory is free",
    gain: Known::Exactly,
    find: Find::Rank(find),
};

/// Whether a call was made by the second run of a forward pass.
fn is_again(of: &Recorded, call: &Call) -> bool {
    let mut is_forward = false;
    for frame in of.around(call) {
        let name = of.text(frame.name);
        if let Some(function) = name.strip_prefix(EVALUATED) {
            // Names of PyTorch's own functions end with a number.
            let is_own = function.ends_with(|letter: char| letter.is_ascii_digit());
            return is_forward && is_own || function.starts_with(CHECKPOINT);
        }
        let operator = name.strip_prefix("aten::");
        is_forward |= operator.is_some_and(|name| FORWARD.split(' ').any(|of| of == name));
    }
    false
}

/// The part of the card's memory that is free when most of it is reserved; `None` if the trace does not tell.
fn free(of: &Recorded) -> Option<f64> {
    let samples = of.timeline.memory.iter().filter(|sample| sample.device_type != 0);
    let reserved = samples.map(|sample| sample.reserved_bytes).max()?;
    Some(1.0 - reserved as f64 / of.timeline.device_bytes? as f64)
}

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let free = free(of);
    if !of.on_device() || free.is_some_and(|part| part < FREE) {
        return None;
    }
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    let again: Vec<bool> = of.calls.iter().map(|call| is_again(of, call)).collect();
    for (at, work) in of.works.iter().enumerate() {
        if work.call.is_some_and(|call| again[call as usize]) {
            tally.add_work(of, work);
            if free.is_some() {
                least.work_ns[at] = scaled(base.work_ns[at], 0.5);
            }
            most.is_gone[at] = true;
        }
    }
    for (at, _) in again.iter().enumerate().filter(|(_, is_again)| **is_again) {
        most.remove_call(at as u32, unprepared(base.lag_ns[at]));
    }
    tally.longest?;
    let (count, ms) = tally.per_step(of);
    let memory = match free {
        Some(part) => format!("{:.0} % of the card's memory are free", 100.0 * part),
        None => "whether memory is free is not recorded (profile_memory=True)".to_owned(),
    };
    let text =
        format!("{count:.0} kernels per step compute activations again, {ms:.2} ms; {memory}");
    let change = "call layers without torch.utils.checkpoint.checkpoint, as many as memory allows\n\
                  in transformers: model.gradient_checkpointing_disable()";
    let found = tally.found(text, change, [least, most]);
    let title = free.is_none().then(|| "Activations are computed again".to_owned());
    Some(Found { title, ..found })
}
