//! Names of the spans and marks that a training step records on the main track.

/// The batch is brought to the device, and the device waits for it.
pub const TO_DEVICE: &str = "to_device";
/// The forward pass and the loss.
pub const FORWARD: &str = "forward";
/// The backward pass, hooks included.
pub const BACKWARD: &str = "backward";
/// Time in which the main thread was blocked on communication. May lie within the passes.
pub const EXPOSED: &str = "exposed";
/// Time that synchronization adds on the main thread: everything after the last backward pass (which may
/// include [`EXPOSED`] time), and arithmetic and copies within the passes.
pub const GRAD_SYNC: &str = "grad_sync";
/// Owners send the parameters that they have updated.
pub const PARAM_BROADCAST: &str = "param broadcast";
/// Gradients are reduced to their owners.
pub const REDUCE_SCATTER: &str = "reduce-scatter";
/// The parameters of a unit are gathered from their owners.
pub const GATHER: &str = "gather";
/// All ranks of a pipeline wait for each other: for the sums of the loss, or for the norm of the gradients.
pub const BARRIER: &str = "barrier";
/// The optimizer.
pub const OPTIMIZER: &str = "optimizer_step";
/// Mark: this rank's gradient of a parameter is final.
pub const GRADIENT_READY: &str = "gradient_ready";
/// Mark: the operations that are submitted from now on are for the next step.
pub const NEXT_STEP: &str = "next_step";
/// Mark: a pass needs the parameters of a unit that are gathered.
pub const GATHER_NEEDED: &str = "gather_needed";
/// Mark: the parameters that a pass needed are there.
pub const GATHER_THERE: &str = "gather_there";
