//! Groups within a group: the rows and the columns of a grid of ranks.
//!
//!     paceline launch -n 6 -- target/release/examples/sub_groups
//!
//! Ranks are numbered row by row. Each rank belongs to two sub-groups, and reduces in one without waiting for
//! the other.

use paceline_collectives::{CollectiveError, Group, ReduceOp};

fn main() -> Result<(), CollectiveError> {
    let world = Group::from_env(None)?;
    let num_columns = columns(world.world_size());
    let (row, column) = (world.rank() / num_columns, world.rank() % num_columns);
    let by_color = |color: usize| -> Result<Group, CollectiveError> {
        let group = world.split(Some(color as u32))?;
        Ok(group.expect("a rank that names a color gets a group"))
    };
    let in_row = by_color(row)?;
    let in_column = by_color(column)?;

    let mut sum_of_row = [world.rank() as i64];
    in_row.all_reduce_slice(&mut sum_of_row, ReduceOp::Sum)?;
    let mut sum_of_column = [world.rank() as i64];
    in_column.all_reduce_slice(&mut sum_of_column, ReduceOp::Sum)?;

    let line = format!(
        "rank {} is ({row}, {column}): its row has {} ranks with sum {}, its column {} with sum {}",
        world.rank(),
        in_row.world_size(),
        sum_of_row[0],
        in_column.world_size(),
        sum_of_column[0],
    );
    // Only one rank prints, so that the lines are in order.
    for line in world.gather_object(&line, 0)?.into_iter().flatten() {
        println!("{line}");
    }
    Ok(())
}

/// The widest grid that is at most as high as it is wide: 3 columns for 6 ranks.
fn columns(world: usize) -> usize {
    let is_width = |&width: &usize| world.is_multiple_of(width) && width * width >= world;
    (1..=world).find(is_width).unwrap_or(world)
}
