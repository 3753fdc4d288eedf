//! NCCL's functions between processes: each test starts this program again, once for each rank.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use crate::common::cuda::{Cuda, UniqueId};

const F32: u32 = 7;
const BF16: u32 = 9;
const I64: u32 = 4;
const SUM: u32 = 0;
const MAX: u32 = 2;
const AVERAGE: u32 = 4;

/// A rank's part of a test. The variable says what it does.
const ROLE: &str = "PACELINE_TEST_ROLE";

/// Starts ranks that do `role`, hands them one id, and returns what each of them printed.
fn ranks(role: &str, size: usize, version_of_last: Option<&str>) -> Vec<String> {
    let cuda = Cuda::start(0);
    let mut id = UniqueId([0; 128]);
    assert_eq!(cuda.ncclGetUniqueId(&mut id), 0);
    let hex: String = id.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "nccl::one_rank", "--nocapture"]);
        command.env(ROLE, format!("{role} {rank} {size} {hex}"));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        if let (Some(version), true) = (version_of_last, rank + 1 == size) {
            command.env("PACELINE_EMULATED_NCCL_VERSION", version);
        }
        command.spawn().unwrap()
    };
    let children: Vec<_> = (0..size).map(start).collect();
    let finish = |mut child: std::process::Child| {
        let output = BufReader::new(child.stdout.take().unwrap());
        // The test harness prints its own words before ours on one line.
        let said = output.lines().map_while(Result::ok);
        let said = said.filter_map(|l| Some(l.split_once("SAYS ")?.1.to_owned())).collect();
        assert!(child.wait().unwrap().success());
        said
    };
    children.into_iter().map(finish).collect::<Vec<String>>()
}

/// The work of a process that was started as a rank. Without a role this test does nothing.
#[test]
fn one_rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let (rank, size): (usize, usize) = (words[1].parse().unwrap(), words[2].parse().unwrap());
    let mut id = UniqueId([0; 128]);
    for (k, byte) in id.0.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&words[3][2 * k..2 * k + 2], 16).unwrap();
    }
    let cuda = Cuda::start(rank as u64);
    let mut communicator = 0;
    let status = cuda.ncclCommInitRank(&mut communicator, size as i32, id, rank as i32);
    let said = match words[0] {
        "version" => format!("{status} {}", cuda.fault()),
        _ => {
            assert_eq!(status, 0, "{}", cuda.fault());
            let said = match words[0] {
                "collectives" => collectives(&cuda, communicator, rank, size),
                "mismatch" => mismatch(&cuda, communicator, rank),
                "abort" => abort(&cuda, communicator, rank),
                other => panic!("{other}"),
            };
            if words[0] == "collectives" {
                assert_eq!(cuda.ncclCommDestroy(communicator), 0);
            }
            said
        }
    };
    println!("SAYS {said}");
    std::io::stdout().flush().unwrap();
}

fn collectives(cuda: &Cuda, comm: usize, rank: usize, size: usize) -> String {
    let stream = cuda.stream();
    let own = |k: usize| (k * (rank + 1)) as f32;
    let total = |k: usize| (k * size * (size + 1) / 2) as f32;
    let n = 10;
    let x = cuda.upload(&(0..n * size).map(own).collect::<Vec<f32>>());
    let y = cuda.allocate(4 * n * size + 4);

    assert_eq!(cuda.ncclAllReduce(x, y, n * size, F32, SUM, comm, stream), 0);
    let want: Vec<f32> = (0..n * size).map(total).collect();
    assert_eq!(cuda.download(y, n * size, stream), want);

    assert_eq!(cuda.ncclAllReduce(x, y, n, F32, AVERAGE, comm, stream), 0);
    let want: Vec<f32> = (0..n).map(|k| total(k) / size as f32).collect();
    assert_eq!(cuda.download(y, n, stream), want);

    // In place, and by a graph that runs three times.
    let (mut graph, mut executable) = (0, 0);
    let z = cuda.upload(&[1.0; 4]);
    assert_eq!(cuda.cuStreamBeginCapture_v2(stream, 1), 0);
    assert_eq!(cuda.ncclAllReduce(z, z, 4, F32, SUM, comm, stream), 0);
    assert_eq!(cuda.cuStreamEndCapture(stream, &mut graph), 0);
    assert_eq!(cuda.cuGraphInstantiateWithFlags(&mut executable, graph, 0), 0);
    for _ in 0..3 {
        assert_eq!(cuda.cuGraphLaunch(executable, stream), 0);
    }
    assert_eq!(cuda.download(z, 4, stream), [(size as f32).powi(3); 4]);
    // A communicator ends after the graphs with its work.
    assert_eq!(cuda.cuGraphExecDestroy(executable), 0);
    assert_eq!(cuda.cuGraphDestroy(graph), 0);

    assert_eq!(cuda.ncclReduceScatter(x, y, n, F32, SUM, comm, stream), 0);
    let want: Vec<f32> = (rank * n..(rank + 1) * n).map(total).collect();
    assert_eq!(cuda.download(y, n, stream), want);

    assert_eq!(cuda.ncclAllGather(x, y, n, F32, comm, stream), 0);
    let want: Vec<f32> =
        (0..size).flat_map(|r| (0..n).map(move |k| (k * (r + 1)) as f32)).collect();
    assert_eq!(cuda.download(y, n * size, stream), want);

    let root = size as i32 - 1;
    assert_eq!(cuda.ncclBroadcast(x, y, n, F32, root, comm, stream), 0);
    let want: Vec<f32> = (0..n).map(|k| (k * size) as f32).collect();
    assert_eq!(cuda.download(y, n, stream), want);

    let z = cuda.upload(&[-1.0; 10]);
    assert_eq!(cuda.ncclReduce(x, z, n, F32, MAX, 0, comm, stream), 0);
    let want = if rank == 0 { want } else { vec![-1.0; 10] };
    assert_eq!(cuda.download(z, n, stream), want);

    // A ring of sends and receives in one group, and one to the rank itself.
    let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
    assert_eq!(cuda.ncclGroupStart(), 0);
    assert_eq!(cuda.ncclSend(x, n, F32, to as i32, comm, stream), 0);
    assert_eq!(cuda.ncclRecv(y, n, F32, from as i32, comm, stream), 0);
    assert_eq!(cuda.ncclSend(x + 4, 1, F32, rank as i32, comm, stream), 0);
    assert_eq!(cuda.ncclRecv(y + 40, 1, F32, rank as i32, comm, stream), 0);
    assert_eq!(cuda.ncclGroupEnd(), 0);
    let mut want: Vec<f32> = (0..n).map(|k| (k * (from + 1)) as f32).collect();
    want.push(own(1));
    assert_eq!(cuda.download(y, n + 1, stream), want);

    // Other types: bf16 pairs of ones, and integers.
    let ones = cuda.upload(&[f32::from_bits(0x3f80_3f80); 3]);
    assert_eq!(cuda.ncclAllReduce(ones, ones, 6, BF16, SUM, comm, stream), 0);
    let sum = cuda.download(ones, 3, stream)[0].to_bits() >> 16;
    assert_eq!(f32::from_bits(sum << 16), size as f32);
    let integers = cuda.upload(&[f32::from_bits(3), f32::from_bits(0)]);
    assert_eq!(cuda.ncclAllReduce(integers, integers, 1, I64, SUM, comm, stream), 0);
    assert_eq!(cuda.download(integers, 2, stream)[0].to_bits(), 3 * size as u32);

    // What is refused at once.
    assert_eq!(cuda.ncclBroadcast(x, y, n, F32, size as i32, comm, stream), 4);
    assert_eq!(cuda.ncclAllReduce(x, y, n, 77, SUM, comm, stream), 4);
    assert_eq!(cuda.ncclAllReduce(x, y, n, F32, SUM, comm + 8, stream), 4);
    assert_eq!(cuda.ncclGroupEnd(), 5);
    "fine".into()
}

fn mismatch(cuda: &Cuda, comm: usize, rank: usize) -> String {
    let stream = cuda.stream();
    let x = cuda.upload(&[1.0; 8]);
    let count = if rank == 0 { 8 } else { 6 };
    assert_eq!(cuda.ncclAllReduce(x, x, count, F32, SUM, comm, stream), 0);
    let status = cuda.cuStreamSynchronize(stream);
    let mut error = 0;
    assert_eq!(cuda.ncclCommGetAsyncError(comm, &mut error), 0);
    format!("{status} {error} {}", cuda.fault())
}

fn abort(cuda: &Cuda, comm: usize, rank: usize) -> String {
    // Rank 1 never calls. Rank 0 sees that nothing comes, and gives up.
    if rank == 1 {
        return "left".into();
    }
    let stream = cuda.stream();
    let x = cuda.upload(&[1.0; 8]);
    assert_eq!(cuda.ncclAllReduce(x, x, 8, F32, SUM, comm, stream), 0);
    for _ in 0..20 {
        assert_eq!(cuda.cuStreamQuery(stream), 600);
    }
    assert_eq!(cuda.ncclCommAbort(comm), 0);
    assert_eq!(cuda.cuStreamSynchronize(stream), 0);
    assert_eq!(cuda.download(x, 8, stream), [1.0; 8]);
    assert_eq!(cuda.ncclAllReduce(x, x, 8, F32, SUM, comm, stream), 4);
    "aborted".into()
}

#[test]
fn collectives_between_processes() {
    for size in [1, 2, 3, 4] {
        assert_eq!(ranks("collectives", size, None), vec!["fine"; size]);
    }
}

#[test]
fn ranks_that_call_different_things_are_told() {
    let said = ranks("mismatch", 2, None);
    assert!(
        said[0].starts_with("719 3 ") && said[0].contains("rank 1 calls AllReduce(Sum) of 6"),
        "{said:?}"
    );
    assert!(said[1].contains("rank 0 calls AllReduce(Sum) of 8 F32"), "{said:?}");
}

#[test]
fn abort_ends_a_wait() {
    assert_eq!(ranks("abort", 2, None), ["aborted", "left"]);
}

#[test]
fn other_versions_are_told() {
    for said in ranks("version", 2, Some("22000")) {
        assert!(said.starts_with("5 ") && said.contains("has version"), "{said}");
    }
}

#[test]
fn two_ranks_on_one_card_are_refused() {
    let cuda = Cuda::start(0);
    let (mut id, mut version) = (UniqueId([0; 128]), 0);
    assert_eq!(cuda.ncclGetVersion(&mut version), 0);
    assert_eq!(version, 22_809);
    assert_eq!(cuda.ncclGetUniqueId(&mut id), 0);
    let mut communicators = [0; 2];
    assert_eq!(cuda.ncclGroupStart(), 0);
    for (rank, communicator) in communicators.iter_mut().enumerate() {
        assert_eq!(cuda.ncclCommInitRank(communicator, 2, id, rank as i32), 0);
    }
    assert_eq!(cuda.ncclGroupEnd(), 5);
    assert!(cuda.fault().contains("Duplicate GPU"), "{}", cuda.fault());
    for communicator in communicators {
        assert_eq!(cuda.ncclCommDestroy(communicator), 0);
    }
}
