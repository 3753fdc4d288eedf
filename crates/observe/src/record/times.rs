//! The times of a step, which add up. This file does not know how they are measured.

use serde::{Deserialize, Serialize};

/// Makes a struct of sums. To add a time, add a line there and its value in [`Meter::times`](crate::record::meter::Meter::times).
macro_rules! step_times {
    ($(#[$about:meta])* { $($(#[$doc:meta])* $name:ident,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct StepTimes {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl StepTimes {
            /// Adds the times of another step.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

step_times! {
    /// The times of one step on one rank, in nanoseconds. Those from `to_device` to `exposed` are disjoint
    /// times of the main thread, or of the device if it computes; the remainder of `step` is outside of them.
    {
        /// The step, from the arrival of the batch to the end of the optimizer.
        step,
        /// Waiting for the batch, before the step.
        data,
        /// The device, or the host that wants to go on, waited for the copy of the batch.
        to_device,
        /// Forward pass and loss.
        forward,
        /// Backward pass, without synchronization inside it.
        backward,
        /// Arithmetic and copies that synchronization adds.
        sync,
        /// Optimizer.
        optimizer,
        /// Exposed communication: the main thread was blocked on communication.
        exposed,
        /// The part of `exposed` in which the operation itself waited for the slowest rank.
        exposed_wait,
        /// Hidden communication: communication ran while the main thread computed. The sums of the loss
        /// do not count.
        hidden,
        /// The batch was copied to the device, in this step or in the one before.
        copying,
        /// The host put work into the stream of a device's kernels.
        launching,
        /// Communication ran. The sums of the loss do not count.
        communicating,
        /// Communication waited for the slowest rank.
        wait,
        /// Communication moved and reduced data.
        moving,
        /// Operations took longer than they would on the emulated link.
        late,
        /// Number of operations.
        ops,
        /// Bytes of the operations of groups of two ranks or more.
        bytes,
    }
}

impl StepTimes {
    /// The time that the main thread computed.
    pub fn compute(&self) -> u64 {
        self.forward + self.backward + self.sync + self.optimizer
    }

    /// The part of the step that no span accounts for.
    pub fn rest(&self) -> u64 {
        self.step.saturating_sub(self.to_device + self.compute() + self.exposed)
    }
}
