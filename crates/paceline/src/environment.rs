//! What a launcher tells a rank through the environment.
//!
//! Ours and torchrun set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
//! MASTER_PORT; ours adds a secret, by which the ranks of a run know each other, and the run folder.

use crate::{Failure, Result};

/// The variable that carries the run's secret.
pub const SECRET: &str = "PACELINE_SECRET";
/// The variable that carries the run folder.
pub const RUN_FOLDER: &str = "PACELINE_RUN_FOLDER";

/// This process's place among the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Its number, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub world_size: usize,
    /// Its number among the ranks of this host.
    pub local_rank: usize,
    /// How many ranks this host has.
    pub local_world_size: usize,
    /// The port that names the meeting point.
    pub master_port: Option<u16>,
    /// The run's secret; empty under another launcher.
    pub secret: String,
    /// The run folder that our launcher made.
    pub run_folder: Option<String>,
}

impl Placement {
    /// Whether `paceline train` started this rank, so that its own flags were checked and warned
    /// about before. `paceline launch` is as foreign to a training run as any other launcher.
    pub fn is_of_train(&self) -> bool {
        self.run_folder.is_some()
    }
}

/// Reads the placement; `None` if no launcher set one. A half-set one is an error that names the
/// missing variable.
pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Placement>> {
    let number = |name: &str| -> Result<Option<usize>> {
        let Some(text) = variable(name) else { return Ok(None) };
        text.trim().parse().map(Some).map_err(|_| {
            Failure::Usage(format!("{name}={text:?} in the environment is not a number"))
        })
    };
    let missing = |there: &str, missing: &str| {
        Failure::Usage(format!(
            "{there} is set in the environment, but {missing} is not; a launcher sets both: set \
             {missing}, or unset {there} to run without a launcher"
        ))
    };
    let (rank, world_size) = match (number("RANK")?, number("WORLD_SIZE")?) {
        (None, None) => return Ok(None),
        (Some(_), None) => return Err(missing("RANK", "WORLD_SIZE")),
        (None, Some(_)) => return Err(missing("WORLD_SIZE", "RANK")),
        (Some(rank), Some(world_size)) => (rank, world_size),
    };
    if rank >= world_size {
        return Err(Failure::Usage(format!(
            "RANK={rank} does not fit WORLD_SIZE={world_size}: ranks count from 0 to {}",
            world_size.saturating_sub(1)
        )));
    }
    let port = number("MASTER_PORT")?;
    let master_port = port
        .map(|port| {
            u16::try_from(port).map_err(|_| {
                Failure::Usage(format!("MASTER_PORT={port} in the environment is no port number"))
            })
        })
        .transpose()?;
    Ok(Some(Placement {
        rank,
        world_size,
        local_rank: number("LOCAL_RANK")?.unwrap_or(rank),
        local_world_size: number("LOCAL_WORLD_SIZE")?.unwrap_or(world_size),
        master_port,
        secret: variable(SECRET).unwrap_or_default(),
        run_folder: variable(RUN_FOLDER),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_from(variables: &[(&str, &str)]) -> Result<Option<Placement>> {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name);
        read(|name| find(name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn torchruns_variables_are_enough() {
        let placement = read_from(&[
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_PORT", "29500"),
        ]);
        let placement = placement.unwrap().unwrap();
        assert_eq!((placement.rank, placement.local_rank), (3, 1));
        assert_eq!(placement.master_port, Some(29500));
        assert!(!placement.is_of_train());
        assert_eq!(read_from(&[]).unwrap(), None);
    }

    #[test]
    fn half_set_and_impossible_placements_are_named() {
        let error = |variables: &[(&str, &str)]| read_from(variables).unwrap_err().to_string();
        assert!(error(&[("RANK", "0")]).contains("but WORLD_SIZE is not"));
        assert!(error(&[("WORLD_SIZE", "2")]).contains("but RANK is not"));
        assert!(error(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("ranks count from 0 to 1"));
        assert!(error(&[("RANK", "x"), ("WORLD_SIZE", "2")]).contains("not a number"));
    }
}
