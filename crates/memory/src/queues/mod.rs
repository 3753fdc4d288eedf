//! Queues: streams of work, and who runs it. They know memory only by the trait
//! [`UsedMemory`](used_memory::UsedMemory).
//!
//! | file | contents |
//! |---|---|
//! | [`order`] | positions in streams, and which come before others |
//! | [`used_memory`] | memory, as far as queues know it |
//! | [`event`], [`stream`] | points in the work of a stream, and the stream |
//! | [`work`] | a piece of work for an accelerator |
//! | [`timed`], [`late`], [`sim`] | an emulated accelerator, whose work runs in real time or as late as allowed |
//! | [`card`] | work on a card |
//! | [`accelerator`], [`device_stream`], [`times`] | a device, its streams, and when their work was done |
//! | [`capture`] | work that a card captures for a graph |

pub(crate) mod accelerator;
pub(crate) mod capture;
mod card;
pub(crate) mod device_stream;
pub(crate) mod event;
mod late;
mod order;
pub(crate) mod sim;
pub(crate) mod stream;
mod timed;
pub(crate) mod times;
pub(crate) mod used_memory;
pub(crate) mod work;
