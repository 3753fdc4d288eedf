//! The data that a launcher gives about a rank.

use crate::Rendezvous;

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
    /// This host's number among the hosts, if the environment says.
    pub node: Option<usize>,
    /// Who started it.
    pub launcher: Launcher,
    /// The variables that make this process a rank, of all launchers that have set any.
    pub variables: Vec<&'static str>,
    /// Where the ranks meet, if the environment says so. See [`Placement::rendezvous`].
    pub rendezvous: Option<Rendezvous>,
}

impl Placement {
    /// Whether all ranks are on this host.
    pub fn is_one_host(&self) -> bool {
        self.local_world_size == self.world_size
    }
}
