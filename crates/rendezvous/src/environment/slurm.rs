//! Reads Slurm's variables, and its short forms for lists of hosts and tasks.

use super::error::EnvironmentError;
use super::placement::{Launcher, Placement};
use super::variables::{Variables, check_range};
use crate::Rendezvous;

/// The first special step number, for the batch script itself, a shell in an allocation, and so on.
const FIRST_SPECIAL_STEP: usize = 0xffff_fff0;

/// The first port for jobs. It lies below the ports that systems assign automatically.
const FIRST_PORT: u64 = 15_000;
/// The number of ports for jobs.
const NUM_PORTS: u64 = 16_000;

/// The placement within a step that srun started. `None` if only a batch script's variables are set.
pub(super) fn placement(variables: &Variables<'_>) -> Result<Option<Placement>, EnvironmentError> {
    let is_step = variables.number("SLURM_STEP_ID")?.is_some_and(|step| step < FIRST_SPECIAL_STEP);
    if !is_step || variables.text("SLURM_PROCID").is_none() {
        return Ok(None);
    }
    let size_name = match variables.text("SLURM_STEP_NUM_TASKS") {
        Some(_) => "SLURM_STEP_NUM_TASKS",
        None => "SLURM_NTASKS",
    };
    let Some((rank, world_size)) = variables.world("SLURM_PROCID", size_name)? else {
        return Ok(None);
    };
    let node = variables.number("SLURM_NODEID")?;
    let Some(local_rank) = variables.number("SLURM_LOCALID")? else {
        let names = ["SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"];
        return variables.placement(Launcher::Slurm, (rank, world_size), names, node).map(Some);
    };
    let local_world_size = local_tasks(variables, world_size, node.unwrap_or(0))?;
    check_range("SLURM_LOCALID", local_rank, "the tasks of this host", local_world_size)?;
    let (launcher, variables, rendezvous) = (Launcher::Slurm, Vec::new(), None);
    Ok(Some(Placement {
        rank,
        world_size,
        local_rank,
        local_world_size,
        node,
        launcher,
        variables,
        rendezvous,
    }))
}

/// The name of this step, which differs from those of other steps.
pub(super) fn job(variables: &Variables<'_>) -> Option<String> {
    let job = variables.text("SLURM_JOB_ID").or_else(|| variables.text("SLURM_JOBID"))?;
    Some(format!("{job}.{}", variables.text("SLURM_STEP_ID")?))
}

/// The rendezvous of a step on several hosts: the first host, at a port computed from the numbers of the job and the
/// step, so that all ranks know it, and two jobs seldom share one.
pub(super) fn rendezvous(
    variables: &Variables<'_>,
    secret: String,
) -> Result<Option<Rendezvous>, EnvironmentError> {
    let names = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let found = names.iter().find_map(|name| Some((*name, variables.text(name)?)));
    let (Some((name, value)), Some(job)) = (found, job(variables)) else { return Ok(None) };
    let Some(host) = first_host(&value) else {
        return Err(EnvironmentError::NotAList { name: name.into(), value });
    };
    let number =
        |text: &str| text.bytes().fold(0u64, |n, byte| (n * 31 + u64::from(byte)) % NUM_PORTS);
    let port = FIRST_PORT + number(&job);
    Ok(Some(Rendezvous::by_tcp(host, port as u16, secret)))
}

/// The ranks on host number `node`.
fn local_tasks(
    variables: &Variables<'_>,
    world_size: usize,
    node: usize,
) -> Result<usize, EnvironmentError> {
    for name in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
        if let Some(value) = variables.text(name) {
            let not_a_list =
                || EnvironmentError::NotAList { name: name.into(), value: value.clone() };
            return tasks_of_node(&value, node).ok_or_else(not_a_list);
        }
    }
    let num_nodes = variables.number("SLURM_NNODES")?.unwrap_or(1).max(1);
    match variables.number("SLURM_NTASKS_PER_NODE")? {
        Some(tasks) if num_nodes > 1 => Ok(tasks),
        // srun spreads tasks evenly, with one more on each of the first hosts.
        _ => Ok(world_size / num_nodes + usize::from(node < world_size % num_nodes)),
    }
}

/// The number of tasks of one host in a list such as `2(x3),1`.
pub(super) fn tasks_of_node(list: &str, node: usize) -> Option<usize> {
    let mut first = 0;
    for part in list.split(',') {
        let (tasks, repeated) = match part.trim().split_once("(x") {
            Some((tasks, repeated)) => (tasks, repeated.strip_suffix(')')?.parse().ok()?),
            None => (part.trim(), 1),
        };
        let tasks: usize = tasks.parse().ok()?;
        if (first..first + repeated).contains(&node) {
            return Some(tasks);
        }
        first += repeated;
    }
    None
}

/// The first host of a list such as `node[003-007,9]-ib,other`: the first number of each bracket.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find([',', '[']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        if !rest[end..].starts_with('[') {
            break;
        }
        let (inside, after) = rest[end + 1..].split_once(']')?;
        let number = inside.split([',', '-']).next()?;
        if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        host.push_str(number);
        rest = after;
    }
    (!host.is_empty()).then_some(host)
}
