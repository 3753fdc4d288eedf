//! The settings of a run's profile: which steps are recorded, and where traces go.
//!
//! The window is counted in steps of this run: `wait` and `warmup` steps are skipped, then `active` steps
//! are recorded.

use std::path::PathBuf;

use paceline_failure::outputs::check_folder;
use paceline_failure::{Failure, Result};
use serde::Serialize;

use crate::flags::ProfileArgs;

/// Which steps are recorded, and where traces go.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProfileConfig {
    /// Number of steps that are skipped at the start.
    pub wait: u64,
    /// Number of steps that are skipped after those.
    pub warmup: u64,
    /// Number of steps that are recorded then.
    pub active: u64,
    /// The folder in which each rank has a folder for its traces.
    #[serde(rename = "dir")]
    pub folder: PathBuf,
}

/// Holistic Trace Analysis leaves out the last step of a trace, so of a trace with fewer steps than this
/// it sees at most one.
const FEW_STEPS: u64 = 3;

/// Checks the flags for a run of `total_steps` steps with the given strategy. Returns `None` without
/// `--profile`.
pub fn resolve(
    args: &ProfileArgs,
    strategy: &str,
    total_steps: u64,
    warnings: &mut Vec<String>,
) -> Result<Option<ProfileConfig>> {
    let given = [
        ("--profile-wait", args.profile_wait.is_some()),
        ("--profile-warmup", args.profile_warmup.is_some()),
        ("--profile-active", args.profile_active.is_some()),
        ("--profile-dir", args.profile_dir.is_some()),
    ];
    if !args.profile {
        return match given.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => {
                Err(Failure::Usage(format!("{flag} is about --profile; pass that too")))
            }
            None => Ok(None),
        };
    }
    let (wait, warmup) = (args.profile_wait.unwrap_or(1), args.profile_warmup.unwrap_or(2));
    let active = args.profile_active.unwrap_or(10);
    let needed = wait.saturating_add(warmup).saturating_add(active);
    if needed > total_steps {
        return Err(Failure::Usage(format!(
            "--profile: {wait} + {warmup} + {active} steps are to be left out and recorded, but the run \
             has {total_steps}; lower --profile-active, --profile-wait or --profile-warmup, or pass \
             more --epochs or --steps"
        )));
    }
    if active < FEW_STEPS {
        warnings.push(format!(
            "--profile-active {active}: Holistic Trace Analysis leaves the last step out where there are two \
             or more; record {FEW_STEPS} at least for it"
        ));
    }
    let folder = args.profile_dir.clone().unwrap_or_else(|| "profile".into()).join(strategy);
    Ok(Some(ProfileConfig { wait, warmup, active, folder }))
}

impl ProfileConfig {
    /// Checks that traces can be written.
    pub fn check(&self) -> Result<()> {
        check_folder("--profile-dir", &self.folder, "pass a folder that you can write to")
    }
}
