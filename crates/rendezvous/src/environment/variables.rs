//! The variables of the environment, read with errors that name the variable.

use super::error::EnvironmentError;
use super::placement::{Launcher, Placement};

/// The variable that carries the run's secret.
pub const SECRET: &str = "PACELINE_SECRET";

/// The variable that names the launcher of this host's ranks, if a run has several hosts.
pub const LAUNCH: &str = "PACELINE_LAUNCH";

/// The environment. Its errors name the variable.
pub(super) struct Variables<'a> {
    pub(super) lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name)
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<usize>, EnvironmentError> {
        let Some(value) = self.text(name) else { return Ok(None) };
        let not_a_number =
            |_| EnvironmentError::NotANumber { name: name.into(), value: value.clone() };
        value.trim().parse().map(Some).map_err(not_a_number)
    }

    /// A rank and the number of ranks. `None` if neither is set.
    pub(super) fn world(
        &self,
        rank_name: &str,
        size_name: &str,
    ) -> Result<Option<(usize, usize)>, EnvironmentError> {
        match (self.number(rank_name)?, self.number(size_name)?) {
            (None, None) => Ok(None),
            (Some(_), None) => Err(half_set(rank_name, size_name)),
            (None, Some(_)) => Err(half_set(size_name, rank_name)),
            (Some(rank), Some(size)) => {
                check_range(rank_name, rank, size_name, size)?;
                Ok(Some((rank, size)))
            }
        }
    }

    /// Completes a placement by the two variables that hold the rank's place on its host. If they are
    /// not set, all ranks are on this host.
    pub(super) fn placement(
        &self,
        launcher: Launcher,
        (rank, world_size): (usize, usize),
        [rank_name, size_name]: [&str; 2],
        node: Option<usize>,
    ) -> Result<Placement, EnvironmentError> {
        let (local_rank, local_world_size) =
            match (self.number(rank_name)?, self.number(size_name)?) {
                (None, None) => (rank, world_size),
                (Some(local_rank), Some(size)) => (local_rank, size),
                // One variable is enough if it says that all ranks are on this host.
                (Some(local_rank), None) if local_rank == rank => (rank, world_size),
                (None, Some(size)) if size == world_size => (rank, world_size),
                (Some(_), None) => return Err(half_set(rank_name, size_name)),
                (None, Some(_)) => return Err(half_set(size_name, rank_name)),
            };
        check_range(rank_name, local_rank, size_name, local_world_size)?;
        let (variables, rendezvous) = (Vec::new(), None);
        // If ranks are numbered host by host, the rank determines the host.
        let in_blocks = rank % local_world_size == local_rank;
        let node = node.or(in_blocks.then_some(rank / local_world_size));
        Ok(Placement {
            rank,
            world_size,
            local_rank,
            local_world_size,
            node,
            launcher,
            variables,
            rendezvous,
        })
    }
}

fn half_set(there: &str, missing: &str) -> EnvironmentError {
    EnvironmentError::HalfSet { there: there.into(), missing: missing.into() }
}

pub(super) fn check_range(
    name: &str,
    rank: usize,
    world_name: &str,
    world_size: usize,
) -> Result<(), EnvironmentError> {
    if rank < world_size {
        return Ok(());
    }
    let (name, world_name) = (name.into(), world_name.into());
    Err(EnvironmentError::OutOfRange { name, rank, world_name, world_size })
}
