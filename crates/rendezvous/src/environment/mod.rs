//! What a launcher tells a rank through the environment: its place, and where the ranks meet.
//!
//! The first launcher that has set a rank counts, in this order: RANK and WORLD_SIZE (our launcher,
//! torchrun, or a user), Open MPI, PMI (MPICH, Intel MPI), a step of Slurm. This module only reads
//! variables. It opens no file and no connection.

mod error_file;
mod rendezvous;
mod slurm;
#[cfg(test)]
mod tests;

use crate::Rendezvous;

pub use self::error_file::{write_consequence_file, write_error_file};

/// The variable that carries the run's secret.
pub const SECRET: &str = "PACELINE_SECRET";

/// Who started the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `paceline launch` or `paceline train`.
    Paceline,
    /// PyTorch's torchrun.
    Torchrun,
    /// Open MPI's mpirun.
    OpenMpi,
    /// MPICH's mpiexec, or another launcher that speaks PMI, such as Intel MPI's.
    Mpich,
    /// Slurm's srun.
    Slurm,
    /// A user or a script that set RANK and WORLD_SIZE.
    ByHand,
}

/// This process's place among the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Its rank, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub world_size: usize,
    /// Its rank among the ranks of this host.
    pub local_rank: usize,
    /// How many ranks this host has.
    pub local_world_size: usize,
    /// This host's number among the hosts, if the environment tells.
    pub node: Option<usize>,
    /// Who started it.
    pub launcher: Launcher,
    /// Where the ranks meet, if the environment says so. See [`Placement::rendezvous`].
    pub rendezvous: Option<Rendezvous>,
}

/// A variable that makes no sense, or variables that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// A variable that should hold a number holds something else.
    #[error("{name}={value:?} in the environment is not a number")]
    NotANumber {
        /// The variable.
        name: String,
        /// What it holds.
        value: String,
    },
    /// Only one variable of a pair is set.
    #[error(
        "{there} is set in the environment, but {missing} is not; a launcher sets both: set \
         {missing}, or unset {there} to run without a launcher"
    )]
    HalfSet {
        /// The variable that is set.
        there: String,
        /// The variable that is not set.
        missing: String,
    },
    /// A rank that is too large for its world size.
    #[error("{name}={rank} does not fit {world_name}={world_size}: ranks count from 0 to {}",
        world_size.saturating_sub(1))]
    OutOfRange {
        /// The variable with the rank.
        name: String,
        /// The rank.
        rank: usize,
        /// The variable with the number of ranks.
        world_name: String,
        /// The number of ranks.
        world_size: usize,
    },
    /// A number that cannot be a port.
    #[error("MASTER_PORT={0} in the environment is not a port number")]
    NoPort(usize),
    /// A list of hosts or of tasks that cannot be read.
    #[error("{name}={value:?} in the environment cannot be read")]
    NotAList {
        /// The variable.
        name: String,
        /// What it holds.
        value: String,
    },
    /// The environment does not say where the ranks meet.
    #[error("{0}")]
    NoRendezvous(String),
}

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
        for read in [from_rank, from_open_mpi, from_pmi, slurm::placement] {
            if let Some(mut placement) = read(&variables)? {
                placement.rendezvous = rendezvous::find(&variables, &placement)?;
                return Ok(Some(placement));
            }
        }
        Ok(None)
    }

    /// Where the ranks meet. If the environment does not say so, the error says which variables to set.
    pub fn rendezvous(&self) -> Result<&Rendezvous, EnvironmentError> {
        let missing = || EnvironmentError::NoRendezvous(rendezvous::advice(self.launcher).into());
        self.rendezvous.as_ref().ok_or_else(missing)
    }

    /// Whether all ranks are on this host.
    pub fn is_one_host(&self) -> bool {
        self.local_world_size == self.world_size
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

/// The environment. Its errors name the variable.
struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name)
    }

    fn number(&self, name: &str) -> Result<Option<usize>, EnvironmentError> {
        let Some(value) = self.text(name) else { return Ok(None) };
        let not_a_number =
            |_| EnvironmentError::NotANumber { name: name.into(), value: value.clone() };
        value.trim().parse().map(Some).map_err(not_a_number)
    }

    /// A rank and the number of ranks. `None` if neither is set.
    fn world(
        &self,
        rank_name: &str,
        size_name: &str,
    ) -> Result<Option<(usize, usize)>, EnvironmentError> {
        let half_set = |there: &str, missing: &str| {
            Err(EnvironmentError::HalfSet { there: there.into(), missing: missing.into() })
        };
        match (self.number(rank_name)?, self.number(size_name)?) {
            (None, None) => Ok(None),
            (Some(_), None) => half_set(rank_name, size_name),
            (None, Some(_)) => half_set(size_name, rank_name),
            (Some(rank), Some(size)) => {
                check_range(rank_name, rank, size_name, size)?;
                Ok(Some((rank, size)))
            }
        }
    }

    /// Completes a placement by the two variables that hold the rank's place on its host. If they are
    /// not set, all ranks are on this host.
    fn placement(
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
                (there, _) => {
                    let names = if there.is_some() {
                        [rank_name, size_name]
                    } else {
                        [size_name, rank_name]
                    };
                    let [there, missing] = names.map(String::from);
                    return Err(EnvironmentError::HalfSet { there, missing });
                }
            };
        check_range(rank_name, local_rank, size_name, local_world_size)?;
        let rendezvous = None;
        // If ranks are numbered host by host, the rank tells the host.
        let in_blocks = rank % local_world_size == local_rank;
        let node = node.or(in_blocks.then_some(rank / local_world_size));
        Ok(Placement { rank, world_size, local_rank, local_world_size, node, launcher, rendezvous })
    }
}

fn check_range(
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
