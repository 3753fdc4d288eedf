//! Finds the place where ranks meet in the variables of the environment.

use super::error::EnvironmentError;
use super::placement::{Launcher, Placement};
use super::slurm;
use super::variables::{LAUNCH, SECRET, Variables};
use crate::Rendezvous;

/// The longest part of a job's name that becomes part of a socket's name. It is taken from the end of
/// the job's name, where jobs differ.
const MAX_JOB_BYTES: usize = 64;

/// The rendezvous, if the environment names one.
pub(super) fn find(
    variables: &Variables<'_>,
    placement: &Placement,
) -> Result<Option<Rendezvous>, EnvironmentError> {
    let secret = variables.text(SECRET).unwrap_or_default();
    let port = variables.number("MASTER_PORT")?;
    let to_port = |port| match u16::try_from(port) {
        Ok(number @ 1..) => Ok(number),
        _ => Err(EnvironmentError::NoPort(port)),
    };
    let host = variables.text("MASTER_ADDR").filter(|host| !host.is_empty());
    let is_one_host = placement.is_one_host();
    let Some(port) = port.map(to_port).transpose()? else {
        return of_job(variables, placement, secret);
    };
    let Some(host) = host else {
        // On one host the port serves as a name.
        return if is_one_host {
            Ok(Some(Rendezvous::by_port(port, secret)))
        } else {
            Err(EnvironmentError::NoRendezvous(
                "MASTER_PORT is set in the environment, but MASTER_ADDR is not, and the ranks are on \
                 several hosts; set MASTER_ADDR to the host of rank 0"
                    .into(),
            ))
        };
    };
    let agent_serves = variables.text("TORCHELASTIC_USE_AGENT_STORE");
    Ok(Some(match placement.launcher {
        Launcher::Torchrun if agent_serves.as_deref() == Some("True") => {
            let text = |name| variables.text(name).unwrap_or_default();
            let run = text("TORCHELASTIC_RUN_ID");
            let restart = text("TORCHELASTIC_RESTART_COUNT");
            // torchrun passes the variable on. It is added to the secret in the agent's store, which all can read.
            Rendezvous { secret, ..Rendezvous::by_agent(host, port, format!("{run}/{restart}")) }
        }
        Launcher::Paceline if is_one_host => Rendezvous::by_port(port, secret),
        _ => {
            let rendezvous = Rendezvous::by_tcp(host, port, secret);
            match (variables.text(LAUNCH), placement.node) {
                (Some(name), Some(node)) if !name.is_empty() => rendezvous.started_by(&name, node),
                _ => rendezvous,
            }
        }
    }))
}

/// The rendezvous of a job whose launcher names no port.
fn of_job(
    variables: &Variables<'_>,
    placement: &Placement,
    secret: String,
) -> Result<Option<Rendezvous>, EnvironmentError> {
    let first = |names: &[&str]| names.iter().find_map(|name| variables.text(name));
    let job = match placement.launcher {
        Launcher::OpenMpi => first(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]),
        Launcher::Mpich => first(&["PMI_JOBID", "PMIX_NAMESPACE"]),
        Launcher::Slurm => slurm::job(variables),
        Launcher::Paceline | Launcher::Torchrun | Launcher::ByHand => None,
    };
    let Some(job) = job else { return Ok(None) };
    if placement.is_one_host() {
        let letters: Vec<char> = job.chars().filter(char::is_ascii_graphic).collect();
        let end = &letters[letters.len().saturating_sub(MAX_JOB_BYTES)..];
        return Ok(Some(Rendezvous::by_job(&end.iter().collect::<String>(), secret)));
    }
    if placement.launcher == Launcher::Slurm {
        return slurm::rendezvous(variables, secret);
    }
    Ok(None)
}

/// Advice for an environment that names no rendezvous.
pub(super) fn advice(launcher: Launcher) -> &'static str {
    match launcher {
        Launcher::OpenMpi => {
            "mpirun does not tell the ranks where to meet; export MASTER_ADDR (the host of rank 0) \
             and MASTER_PORT (a free port there) and pass both on: mpirun -x MASTER_ADDR -x \
             MASTER_PORT ..."
        }
        Launcher::Mpich => {
            "mpiexec does not tell the ranks where to meet; set MASTER_ADDR (the host of rank 0) \
             and MASTER_PORT (a free port there) for all of them: mpiexec -genv MASTER_ADDR ... \
             -genv MASTER_PORT ..."
        }
        Launcher::Slurm => {
            "this step of Slurm does not tell its hosts (SLURM_JOB_NODELIST is not set); export \
             MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port there)"
        }
        Launcher::Paceline | Launcher::Torchrun | Launcher::ByHand => {
            "MASTER_PORT is not set in the environment; a launcher sets it together with MASTER_ADDR"
        }
    }
}
