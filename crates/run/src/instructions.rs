//! The vector instructions that `--simd` or `PACELINE_SIMD` names: whether this machine has them, and the choice of them for this process.

use std::env;

use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::text::listed;
use paceline_kernels::{Instructions, available_instructions};
use paceline_settings::spec::RunSpec;

/// Fails if the variable names instructions that this machine lacks, or that do not exist.
pub fn check_variable() -> Result<()> {
    let Some(named) = env::var_os(Instructions::VARIABLE) else { return Ok(()) };
    let by = Instructions::VARIABLE;
    match named.printable().as_ref() {
        "" => Ok(()),
        named => named.parse().map_or_else(|_| Err(refusal(by, named)), |wanted| check(by, wanted)),
    }
}

/// Fails if this machine lacks the instructions that a flag or a variable names.
pub(crate) fn check(by: &str, wanted: Instructions) -> Result<()> {
    if available_instructions().contains(&wanted) {
        Ok(())
    } else {
        Err(refusal(by, wanted.name()))
    }
}

fn refusal(by: &str, named: &str) -> Failure {
    let names: Vec<String> =
        available_instructions().into_iter().map(|of| of.to_string()).collect();
    Failure::Usage(format!(
        "{by} {named}: this machine has {}; name one of these, or none",
        listed(&names)
    ))
}

/// Holds this process to the instructions that a run states, or those of the variable, before it computes anything.
pub(crate) fn hold(spec: &RunSpec) -> Result<()> {
    // An unknown name is refused with the other flags.
    let stated = spec.get("simd").and_then(<[String]>::first).and_then(|name| name.parse().ok());
    let Some(wanted) = stated else { return Ok(()) };
    check("--simd", wanted)?;
    Instructions::hold(wanted).map_err(|held| {
        let held = held.map_or("the best that it found", Instructions::name);
        Failure::Usage(format!(
            "--simd {wanted}: this process computes with {held} already; start another one"
        ))
    })
}
