//! The ranks of a command: this process may be one of several ranks, have all ranks as threads, or launch
//! the ranks as processes.
//!
//! Takes the settings that concern ranks, and a function that each rank calls. This file does not know
//! what the function does.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

use paceline_collectives::Group;
use paceline_failure::Result;
use paceline_launch::comm::CommConfig;
use paceline_launch::connect::connect;
use paceline_launch::environment::Placement;
use paceline_launch::launcher::{self, Launch};
use paceline_launch::stop::{self, StopRequest};
use paceline_launch::{pinning, threads};
use paceline_rendezvous::Rendezvous;
use serde::Serialize;

use crate::named::TransportName;

/// How ranks that another launcher started meet.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum InitMethod {
    /// By the environment variables MASTER_ADDR and MASTER_PORT.
    Environment,
    /// Through this file.
    File(PathBuf),
}

/// How many ranks there are, and how they reach each other.
#[derive(Clone, Copy, Debug)]
pub struct Ranks<'a> {
    /// Number of ranks.
    pub world_size: usize,
    /// Compute threads per rank.
    pub threads: usize,
    /// Whether each rank has cores of its own.
    pub pin_cores: bool,
    /// How ranks reach each other.
    pub transport: TransportName,
    /// How ranks talk to each other.
    pub comm: &'a CommConfig,
    /// Where ranks of another launcher meet.
    pub init_method: &'a InitMethod,
}

impl FromStr for InitMethod {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        match text.strip_prefix("file://") {
            _ if text == "env://" => Ok(Self::Environment),
            Some(path) if path.starts_with('/') => Ok(Self::File(path.into())),
            _ => Err("pass env:// or file:///PATH"),
        }
    }
}

impl Ranks<'_> {
    /// Whether this process is not a rank but has to launch the ranks.
    pub fn are_launched(&self, placement: Option<&Placement>) -> bool {
        match placement {
            Some(placement) => placement.is_launcher,
            None => self.world_size > 1 && self.transport != TransportName::Thread,
        }
    }

    /// Calls `rank` with the group and the local rank. If this process is a rank, that is one call. If
    /// all ranks are threads of this process, every thread makes one call. If `rank` looks at a `request`, the first signal
    /// to end becomes that request.
    pub fn run(
        &self,
        placement: Option<&Placement>,
        request: Option<StopRequest>,
        rank: impl Fn(Group, usize) -> Result<()> + Sync,
    ) -> Result<()> {
        let pin = |local_rank| {
            if self.pin_cores {
                pinning::pin(local_rank, self.world_size, self.threads)
            } else {
                Ok(())
            }
        };
        if placement.is_none() && request.is_some() {
            stop::listen(None, request.clone())?;
        }
        match placement {
            Some(placement) => {
                let place = &placement.place;
                let rendezvous = match self.init_method {
                    InitMethod::File(path) => Rendezvous::by_file(path),
                    InitMethod::Environment => place.rendezvous()?.clone(),
                };
                let pinned = self.pin_cores.then_some(self.threads);
                let group =
                    connect(self.transport, self.comm, &rendezvous, place, pinned, request)?;
                rank(group, place.local_rank)
            }
            None if self.world_size == 1 => {
                pin(0)?;
                rank(Group::single()?, 0)
            }
            None => threads::run(self.world_size, self.comm.options(self.world_size), |group| {
                let local_rank = group.rank();
                pin(local_rank)?;
                rank(group, local_rank)
            }),
        }
    }

    /// Starts one process per rank, with the command line of this process and additional variables.
    pub fn launch(
        &self,
        variables: Vec<(&'static str, OsString)>,
        dump_folder: Option<PathBuf>,
    ) -> Result<u8> {
        let args = std::env::args_os().skip(1);
        let mut launch = Launch::of_own_program(args, self.world_size, variables)?;
        launch.output.dump_folder = dump_folder;
        Ok(launcher::launch(&launch)?.code)
    }
}
