//! One program for every launcher: it prints who started it, which rank it is, and what connects the ranks.
//!
//!     paceline launch -n 2 -- target/release/examples/launched
//!     torchrun --no-python --nproc-per-node 2 target/release/examples/launched
//!     mpirun -n 2 target/release/examples/launched
//!     srun -n 2 target/release/examples/launched
//!
//! A failure ends the program with one line and the exit code 1, and tells torchrun the reason.

use std::process::ExitCode;

use paceline_collectives::{
    CollectiveError, Group, Placement, write_consequence_file, write_error_file,
};

fn main() -> ExitCode {
    let Err(error) = run() else { return ExitCode::SUCCESS };
    let message = error.to_string();
    // torchrun reports the rank that failed first, not those that failed as a consequence.
    if error.is_consequence() {
        write_consequence_file(&message, &error.culprits());
    } else {
        write_error_file(&message);
    }
    eprintln!("error: {message}");
    ExitCode::FAILURE
}

fn run() -> Result<(), CollectiveError> {
    let group = Group::from_env(None)?;
    let line = match Placement::from_env()? {
        Some(place) => format!(
            "rank {} of {} (local rank {} of {}): started by {:?}, connected by {}",
            place.rank,
            place.world_size,
            place.local_rank,
            place.local_world_size,
            place.launcher,
            group.transport().name(),
        ),
        None => "no launcher started this process: it is a group of one".to_owned(),
    };
    for line in group.gather_object(&line, 0)?.into_iter().flatten() {
        println!("{line}");
    }
    Ok(())
}
