//! Buffers: memory that is counted, and claimed before it is used. They know queues only by streams and events.
//!
//! | file | contents |
//! |---|---|
//! | [`heap`], [`mapping`] | where memory comes from |
//! | [`account`] | bytes by category |
//! | [`uses`] | which uses of a range are ordered |
//! | [`allocator`], [`buffer`] | pooled memory, and claims on its ranges |
//! | [`dtype`], [`shape`], [`tensor`] | typed and shaped ranges |

pub(crate) mod account;
pub(crate) mod allocator;
pub(crate) mod buffer;
pub(crate) mod dtype;
mod heap;
pub(crate) mod mapping;
pub(crate) mod shape;
pub(crate) mod tensor;
mod uses;
