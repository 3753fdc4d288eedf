//! The environment that a launcher gives a rank: the rank's placement, and where the ranks meet.
//!
//! The first launcher that has set a rank counts, in this order: RANK and WORLD_SIZE (our launcher,
//! torchrun, or a user), Open MPI, PMI (MPICH, Intel MPI), a step of Slurm. This module only reads
//! variables. It opens no file and no connection.

mod error;
mod error_file;
mod placement;
mod rendezvous;
mod slurm;
#[cfg(test)]
mod tests;
mod variables;

use self::variables::Variables;
use crate::Rendezvous;

pub use self::error::EnvironmentError;
pub use self::error_file::{ERROR_FILE, read_culprits, write_consequence_file, write_error_file};
pub use self::placement::{Launcher, Placement};
pub use self::variables::{LAUNCH, SECRET};

type Read = fn(&Variables<'_>) -> Result<Option<Placement>, EnvironmentError>;

/// How the environment of each launcher is read, the first one that counts first, and the variables without which a
/// process is not one of its ranks.
const ENVIRONMENTS: [(Read, &[&str]); 4] = [
    (from_rank, &["RANK", "WORLD_SIZE"]),
    (from_open_mpi, &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]),
    (from_pmi, &["PMI_RANK", "PMI_SIZE"]),
    (slurm::placement, &["SLURM_PROCID"]),
];

impl Placement {
    /// Reads this process's environment; `None` if no launcher has set anything there.
    pub fn from_env() -> Result<Option<Self>, EnvironmentError> {
        Self::from_lookup(|name| std::env::var(name).ok())
    }

    /// Like [`Placement::from_env`], for any source of variables.
    pub fn from_lookup(
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, EnvironmentError> {
        let variables = Variables { lookup: &lookup };
        let mut found = None;
        // Without those of the first launcher, those of the next one would count.
        let mut names = Vec::new();
        for (read, of_launcher) in ENVIRONMENTS {
            match read(&variables) {
                Ok(None) => continue,
                placement if found.is_none() => found = placement?,
                _ => {}
            }
            names.extend(of_launcher.iter().filter(|name| variables.text(name).is_some()));
        }
        let Some(mut placement) = found else { return Ok(None) };
        placement.variables = names;
        placement.rendezvous = rendezvous::find(&variables, &placement)?;
        Ok(Some(placement))
    }

    /// Where the ranks meet. If the environment does not say so, the error says which variables to set.
    pub fn rendezvous(&self) -> Result<&Rendezvous, EnvironmentError> {
        let missing = || EnvironmentError::NoRendezvous(rendezvous::advice(self.launcher).into());
        self.rendezvous.as_ref().ok_or_else(missing)
    }
}

/// RANK and WORLD_SIZE.
fn from_rank(variables: &Variables<'_>) -> Result<Option<Placement>, EnvironmentError> {
    let Some(world) = variables.world("RANK", "WORLD_SIZE")? else { return Ok(None) };
    let is_set = |name: &str| variables.text(name).is_some();
    let launcher = if is_set("TORCHELASTIC_RUN_ID") {
        Launcher::Torchrun
    } else if is_set(SECRET) && is_set("LOCAL_RANK") && is_set("LOCAL_WORLD_SIZE") {
        Launcher::Paceline
    } else {
        Launcher::ByHand
    };
    let node = variables.number("GROUP_RANK")?;
    variables.placement(launcher, world, ["LOCAL_RANK", "LOCAL_WORLD_SIZE"], node).map(Some)
}

fn from_open_mpi(variables: &Variables<'_>) -> Result<Option<Placement>, EnvironmentError> {
    let world = variables.world("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")?;
    let Some(world) = world else { return Ok(None) };
    let local = ["OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"];
    variables.placement(Launcher::OpenMpi, world, local, None).map(Some)
}

fn from_pmi(variables: &Variables<'_>) -> Result<Option<Placement>, EnvironmentError> {
    let Some(world) = variables.world("PMI_RANK", "PMI_SIZE")? else { return Ok(None) };
    // Slurm speaks PMI too, but its own variables say more.
    if let Some(placement) = slurm::placement(variables)?
        && (placement.rank, placement.world_size) == world
    {
        return Ok(Some(placement));
    }
    let local = ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
    variables.placement(Launcher::Mpich, world, local, None).map(Some)
}
