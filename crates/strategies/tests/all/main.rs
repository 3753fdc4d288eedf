//! The tests of strategies on the processor, one program: each program is linked once more, with the whole crate.

mod batch_norm;
mod commit;
#[path = "../common/mod.rs"]
mod common;
mod communication;
mod exactness;
mod example;
mod failed_step;
mod footprints;
mod graphs;
mod lossy;
mod parity;
mod pipeline;
mod plan;
mod sharding;
mod sim;
mod tensor;
mod uneven;
mod units;
