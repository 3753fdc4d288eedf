//! Runs all-reduces of random sizes without end, to see what happens when a rank dies.
//!
//! ```text
//! cargo build --release --examples -p paceline-collectives
//! paceline launch -n 4 -- target/release/examples/endless --transport shm
//! ```
//!
//! Each rank prints its process ID after the first few operations, and then nothing until it fails.
//! `bench/kill_ranks.py` starts this program and kills a rank.

use std::time::Duration;

use paceline_collectives::{CollectiveError, Group, GroupOptions, Placement, ReduceOp};

/// Elements of the longest message: 8 MB.
const MAX_ELEMENTS: u64 = 2 << 20;
/// The exit code that tells the launcher that this rank only reports the failure of another rank.
const EXIT_CONSEQUENCE: u8 = 3;

fn main() -> std::process::ExitCode {
    let (transport, timeout) = match arguments() {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("endless: {message}; use --transport shm|tcp and --timeout SECONDS");
            return 2.into();
        }
    };
    let outcome = match Placement::from_env() {
        Ok(Some(placement)) => run(&placement, &transport, timeout),
        Ok(None) => Err("start this with paceline launch -n N -- endless".into()),
        Err(error) => Err(error.into()),
    };
    let Err(error) = outcome else { return 0.into() };
    eprintln!("endless: {error}");
    let is_consequence =
        error.downcast_ref::<CollectiveError>().is_some_and(CollectiveError::is_consequence);
    if is_consequence { EXIT_CONSEQUENCE.into() } else { 1.into() }
}

fn arguments() -> Result<(String, Duration), String> {
    let (mut transport, mut timeout) = ("shm".to_owned(), Duration::from_secs(60));
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--transport" if ["shm", "tcp"].contains(&value.as_str()) => transport = value,
            "--timeout" => {
                let secs = value.parse().ok().filter(|secs| *secs > 0);
                timeout = Duration::from_secs(secs.ok_or("--timeout is a number above zero")?);
            }
            _ => return Err(format!("{flag} {value} is not understood")),
        }
    }
    Ok((transport, timeout))
}

fn run(
    placement: &Placement,
    transport: &str,
    timeout: Duration,
) -> Result<(), Box<dyn std::error::Error>> {
    let (rank, world) = (placement.rank, placement.world_size);
    let options = GroupOptions { timeout, ..GroupOptions::for_local_ranks(world) };
    let rendezvous = placement.rendezvous()?;
    let group = match transport {
        "tcp" => Group::tcp(rendezvous, "127.0.0.1", rank, world, options)?,
        _ => Group::shm(rendezvous, rank, world, options)?,
    };
    let mut data = vec![1f32; MAX_ELEMENTS as usize];
    // A xorshift generator (Marsaglia) gives the same sizes on all ranks.
    let mut random = 88_172_645_463_325_252u64;
    for step in 0u64.. {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // The shift by 0 to 15 bits makes small sizes as frequent as large ones.
        let len = random % (MAX_ELEMENTS >> (random >> 60)) + 1;
        group.all_reduce_slice(&mut data[..len as usize], ReduceOp::Mean)?;
        if step == 10 {
            println!("rank {rank} is process {}", std::process::id());
        }
    }
    Ok(())
}
