//! The shortest program: an all-reduce of a `Vec<f32>` between processes.
//!
//!     paceline launch -n 2 -- target/release/examples/blocking

use paceline_collectives::{CollectiveError, Group, ReduceOp};

fn main() -> Result<(), CollectiveError> {
    let group = Group::from_env(None)?;
    let mut data = vec![group.rank() as f32 + 1.0; 1_000_000];
    group.all_reduce_slice(&mut data, ReduceOp::Sum)?;
    println!("rank {} of {}: {}", group.rank(), group.world_size(), data[0]);
    Ok(())
}
