//! `paceline bench` from flags to table, files and charts.

use crate::common::{Run, Sandbox, json, torch};
use serde_json::Value;

const HEADER: &str = "\
#
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong 
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         
";

/// Few iterations, so that the tests are fast.
const SHORT: &str = "--iters 3 -w 1";

fn bench_in(sandbox: &Sandbox, flags: &str) -> Run {
    sandbox.run(&format!("bench {flags}"))
}

fn bench(flags: &str) -> Run {
    bench_in(&Sandbox::new(), flags)
}

/// The rows of all tables, each as its words.
fn rows(run: &Run) -> Vec<Vec<&str>> {
    let rows = run.stdout.lines().filter(|line| !line.starts_with('#'));
    rows.map(|line| line.split_whitespace().collect()).collect()
}

#[test]
fn pinned_ranks_are_told_with_their_processors() {
    for transport in ["thread", "shm"] {
        let flags = format!("all_reduce -b 4K -e 4K --nproc 1 --transport {transport} {SHORT}");
        let pinned = bench(&format!("{flags} --pin-cores")).ok();
        assert!(pinned.line("# 1 rank over ").contains("; rank 0 computes on "), "{pinned:#?}");
        assert!(!bench(&flags).ok().stdout.contains("computes on"), "{flags}");
    }
}

#[test]
fn every_operation_gives_the_table_of_nccl_tests_without_a_wrong_element() {
    // Size, count, redop and root with 3 ranks and 12,000 bytes, and the number of timings.
    let whole = ["12000", "3000"];
    let share = ["12000", "1000"];
    for (op, size, redop, root, timings) in [
        ("all_reduce", whole, "sum", "-1", 2),
        ("reduce_scatter", share, "sum", "-1", 2),
        ("all-gather", share, "none", "-1", 2),
        ("broadcast", whole, "none", "1", 2),
        ("reduce", whole, "sum", "1", 2),
        ("gather", share, "none", "1", 2),
        ("scatter", share, "none", "1", 2),
        ("all-to-all", share, "none", "-1", 1),
        ("send-recv", whole, "none", "-1", 1),
        ("barrier", ["0", "0"], "none", "-1", 1),
    ] {
        let run =
            bench(&format!("{op} {SHORT} --nproc 3 --transport thread -r 1 -b 12000 -e 12000"));
        let run = run.ok();
        assert!(run.stdout.contains(HEADER), "{}", run.stdout);
        let rows = rows(&run);
        let [row] = &rows[..] else { panic!("{op}: {}", run.stdout) };
        assert_eq!(row[..5], [size[0], size[1], "float", redop, root], "{op}");
        assert_eq!(row.len(), 5 + 4 * timings, "{op}: {row:?}");
        for timing in row[5..].chunks(4) {
            assert!(timing[0].parse::<f64>().unwrap() > 0.0, "{op}: {row:?}");
            assert_eq!(timing[3], "0", "{op}: {row:?}");
        }
        assert!(run.stdout.contains("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : "));
        let name = op.replace('-', "_");
        assert!(run.stdout.contains(&format!("# Collective test concluded: {name}\n")));
    }
}

#[test]
fn a_sweep_over_transports_and_ranks_writes_one_report() {
    let sandbox = Sandbox::new();
    let flags = format!(
        "all_reduce {SHORT} --transport thread,shm,tcp,hybrid,mpi --nproc 2,3 --size-mb 0.004,0.1 \
         -d double -o avg -J run.json --csv run.csv --charts charts"
    );
    let run = bench_in(&sandbox, &flags).ok();
    // Two sizes each; hybrid cannot have 3 ranks on 2 hosts.
    let rows = rows(&run);
    assert_eq!(rows.len(), 2 * (2 + 2 + 2 + 1), "{}", run.stdout);
    for row in &rows {
        assert_eq!((row[2], row[3], row[8], row[12]), ("double", "avg", "0", "0"), "{row:?}");
    }
    let skipped: Vec<&str> =
        run.stdout.lines().filter(|line| line.starts_with("# skipped")).collect();
    assert_eq!(skipped.len(), 3, "{skipped:?}");
    assert!(skipped[0].contains("hybrid between 3 ranks: 3 ranks cannot stand for 2 hosts"));
    assert!(skipped[1].contains("mpi between 2 ranks: this paceline was built without MPI"));

    let report = json(&sandbox.path("run.json"));
    assert_eq!(report["version"], 3);
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), rows.len());
    let transports: Vec<&Value> = results.iter().map(|row| &row["transport"]).collect();
    assert_eq!((transports[0], transports[13]), (&"thread".into(), &"hybrid".into()));
    assert_eq!(results[0]["size"], 4000);
    // Where there is no room for arrays as large as the caches, memory is not measured. What is free
    // changes, so that may be so for some of the groups only.
    let fractions = results.iter().filter_map(|row| row["memory_fraction"].as_f64());
    let fractions: Vec<f64> = fractions.collect();
    assert!(fractions.iter().all(|fraction| *fraction > 0.0), "{fractions:?}");
    assert_eq!(!fractions.is_empty(), report["memory_bandwidth_gb_s"].is_number(), "{report}");
    assert_eq!(results[13]["memory_fraction"], Value::Null, "sockets are no memory");
    assert!(results[0]["in_place"]["p99_us"].as_f64().unwrap() > 0.0);
    assert_eq!(report["out_of_bounds"]["count"], 0);
    assert_eq!(report["skipped"].as_array().unwrap().len(), 3);
    let csv = std::fs::read_to_string(sandbox.path("run.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + rows.len());

    let files = ["", "/busbw.svg", "/time.svg"];
    let mut expected: Vec<String> = files.iter().map(|name| format!("charts{name}")).collect();
    expected.extend(["run.csv".to_owned(), "run.json".to_owned()]);
    assert_eq!(sandbox.contents(), expected);

    // The report can be compared with another run.
    let flags = format!("all_reduce {SHORT} --size-mb 0.004 --transport shm --nproc 2");
    let compared = bench_in(&sandbox, &format!("{flags} --compare run.json")).ok();
    let lines = compared.stdout.lines().filter(|line| line.contains("(run)")).count();
    assert_eq!(lines, 4, "{}", compared.stdout);
}

#[test]
fn cycles_calls_and_iterations_are_those_of_nccl_tests() {
    for transport in ["thread", "shm"] {
        let sandbox = Sandbox::new();
        let flags = "all_reduce -n 4 -w 1 -m 3 -N 2 -I 1 -b 1K -e 2K --nproc 2 -J run.json";
        let run = bench_in(&sandbox, &format!("{flags} --transport {transport}")).ok();
        assert!(run.line("# 2 ranks over ").contains("medians of 4 iterations of 3 calls after 1"));
        let sizes: Vec<&str> = rows(&run).iter().map(|row| row[0]).collect();
        assert_eq!(sizes, ["1024", "2048", "1024", "2048"]);
        for row in json(&sandbox.path("run.json"))["results"].as_array().unwrap() {
            for place in ["out_of_place", "in_place"] {
                let each = row[format!("{place}_per_iter")]["times_us"].as_array().unwrap();
                let each: Vec<f64> = each.iter().filter_map(Value::as_f64).collect();
                let most = each.iter().copied().reduce(f64::max);
                assert_eq!((each.len(), most), (4, row[place]["max_us"].as_f64()), "{row}");
            }
        }
    }
}

#[test]
fn lines_have_the_published_form() {
    let run = bench(&format!("all_reduce {SHORT} --style lines --size-mb 1 --nproc 1,2")).ok();
    for nproc in [1, 2] {
        run.line(&format!("Config: Backend=shm, Processes={nproc}, Size=1MB"));
    }
    let results: Vec<&str> =
        run.stdout.lines().filter(|line| line.starts_with("-> Avg Time: ")).collect();
    assert_eq!(results.len(), 2, "{}", run.stdout);
    assert!(results.iter().all(|line| line.contains(" ms | Effective Bandwidth: ")));
    run.line("Backend  Processes  Size (MB)  Avg Time (ms)  Bandwidth (GiB/s)");
}

#[test]
fn what_the_memory_cannot_hold_is_skipped_with_the_reason() {
    let run = bench(&format!("broadcast {SHORT} --size-mb 1,100000000 --transport thread")).ok();
    assert_eq!(rows(&run).len(), 1);
    let skipped = run.line("# skipped 100000000000000 B over thread between ");
    assert!(skipped.contains(" ranks need ") && skipped.ends_with(" may be used"), "{skipped}");
}

#[test]
fn a_link_gives_predictions_and_is_kept_to() {
    let sandbox = Sandbox::new();
    let flags = "all_reduce --iters 3 -w 1 --transport thread,tcp --nproc 2 --link 1gbit,20ms \
                 --size-mb 0.1 --columns extended -J run.json";
    let run = bench_in(&sandbox, flags).ok();
    assert!(run.stdout.contains("on an emulated link of 1 Gbit/s, 20000.0 us"), "{}", run.stdout);
    for row in json(&sandbox.path("run.json"))["results"].as_array().unwrap() {
        // 3 steps of 20 ms, and 100,000 bytes and 88 of a header at 125 MB/s.
        assert_eq!(row["predicted_us"].as_f64().unwrap().round(), 60_801.0);
        assert!(row["out_of_place"]["time"].as_f64().unwrap() >= 60_800.0);
    }
}

#[test]
fn the_algorithm_is_named() {
    let sandbox = Sandbox::new();
    let flags = format!(
        "all_reduce {SHORT} --transport tcp,hybrid --nproc 2 --algorithm ring -b 1K -e 1K \
         --columns extended -J run.json"
    );
    let run = bench_in(&sandbox, &flags).ok();
    assert!(
        run.line("# 2 ranks over tcp").contains("; algorithm ring (another order of sums"),
        "{}",
        run.stdout
    );
    assert!(run.line("# 2 ranks over hybrid").ends_with("; algorithm direct"), "{}", run.stdout);
    run.line("# predicted = ");
    let report = json(&sandbox.path("run.json"));
    let algorithms: Vec<&Value> =
        report["results"].as_array().unwrap().iter().map(|row| &row["algorithm"]).collect();
    assert_eq!(algorithms, ["ring", "direct"]);
}

#[test]
fn lines_of_other_programs_are_compared() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "peer.jsonl",
        b"{\"side\": \"torch-gloo\", \"ranks\": 2, \"bytes\": 100000, \"ms\": 1.5}\n",
    );
    let flags =
        format!("all_reduce {SHORT} --size-mb 0.1 --nproc 2 --private --compare peer.jsonl");
    let run = bench_in(&sandbox, &flags).ok();
    assert!(run.line("shm   torch-gloo").contains("1.5000"), "{}", run.stdout);
    assert!(run.stdout.contains("; private buffers"), "{}", run.stdout);
}

#[test]
fn ranks_of_another_launcher_measure_together() {
    let sandbox = Sandbox::new();
    let binary = env!("CARGO_BIN_EXE_paceline");
    let launch = |more: &str| {
        let args = format!("-n 2 -- {binary} bench all_gather {SHORT} -b 8 -e 8 {more}");
        sandbox.launch(&args.split(' ').filter(|arg| !arg.is_empty()).collect::<Vec<_>>())
    };
    let run = launch("--transport tcp -J run.json").ok().without_ranks();
    assert_eq!(rows(&run).len(), 1, "{}", run.stdout);
    assert_eq!(json(&sandbox.path("run.json"))["results"][0]["nproc"], 2);
    let nested = launch("--nproc 2");
    nested.ended_with(2, &["--nproc 2 starts ranks of its own"]);
    let several = launch("--transport shm,tcp");
    assert!(several.stderr.contains("one transport only"), "{}", several.stderr);
}

#[test]
fn a_link_that_is_too_fast_is_refused() {
    let flags = "all_reduce --link nvlink4 --nproc 2 -b 1K -e 1K --transport thread,shm";
    let run = bench(flags);
    assert_eq!(run.code, Some(1), "{run:#?}");
    for transport in ["thread", "shm"] {
        let skipped = run.line(&format!("# skipped all sizes over {transport} between 2 ranks: "));
        assert!(skipped.starts_with("cannot emulate a link of 3600 Gbit/s"), "{skipped}");
        assert!(skipped.ends_with("; pass a slower --link, or a faster --transport"), "{skipped}");
    }
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    assert!(run.stderr.contains("nothing was measured"), "{}", run.stderr);
}

#[test]
fn help_opens_with_examples() {
    let mut command = Sandbox::new().paceline();
    command.current_dir("/").args(["bench", "--help"]).env("COLUMNS", "100");
    let run = Run::of(command).ok();
    let head: Vec<&str> =
        run.stdout.lines().take_while(|line| !line.starts_with("Usage")).collect();
    insta::assert_snapshot!(head.join("\n"), @r"
    Examples:
      paceline bench all_reduce                           1 KiB to 64 MiB, 2 ranks in shared memory
      paceline bench all-gather -b 8 -e 128M -f 2 -w 9    sizes and warm-up as in nccl-tests
      paceline bench all_reduce --sweep --nproc 2,4,6 --transport thread,shm,tcp --style lines
      paceline bench all_reduce --size-mb 1,10 --transport tcp --link 10gbit,50us --columns extended
      paceline bench all_reduce -J run.json --charts charts --compare earlier.json
      paceline bench all_reduce --against torch           PyTorch's collectives, in turns with ours
      paceline bench scaling --nproc 1,2,4                how training speeds up with ranks
      paceline bench sharded-optimizer                    what a sharded optimizer costs and saves

    Measure how fast the ranks exchange data, and how training scales
    ");
    for heading in ["Sizes:", "Measuring:", "Ranks:", "Communication:", "Output:"] {
        assert!(run.stdout.lines().any(|line| line == heading), "no {heading}");
    }
}

#[test]
fn bandwidths_below_what_is_expected_end_with_4() {
    let sandbox = Sandbox::new();
    let flags = format!("all_reduce {SHORT} --nproc 2 -b 1K -e 64K -f 64");
    bench_in(&sandbox, &format!("{flags} -J earlier.json")).ok();
    // No machine is a million times as slow from one minute to the next.
    let same = format!("{flags} --compare earlier.json --expect 0.000001");
    let run = bench_in(&sandbox, &same).ok();
    run.prints(&[
        "# Spread (p99/median)  : ",
        "Bus bandwidth: at least 0.000001 of --compare's, of ",
    ]);
    let line = |ranks: usize, bytes: u64, ms: f64| {
        format!("{{\"side\": \"a\", \"ranks\": {ranks}, \"bytes\": {bytes}, \"ms\": {ms}}}\n")
    };
    // Latency decides about the first.
    let fast = line(2, 1024, 1e-9) + &line(2, 65536, 1e-8);
    sandbox.write("fast.json", fast.as_bytes());
    let run = bench_in(&sandbox, &format!("{flags} --compare fast.json --expect 0.9"));
    assert_eq!(run.code, Some(4), "{run:#?}");
    let below =
        run.stdout.lines().skip_while(|line| !line.starts_with("Bus bandwidth below 0.9 of "));
    let below: Vec<&str> = below.skip(1).collect();
    assert!(below.len() == 1 && below[0].starts_with("  65536 B, 2 ranks over shm: "), "{run:#?}");
    // A link takes at least its own time.
    let link = format!("{flags} --transport tcp --link 100mbit,1us --expect 1");
    assert_eq!(bench_in(&sandbox, &link).code, Some(4));
    let slow = format!("{flags} --transport tcp --link 100mbit,1us --expect 0.000001");
    bench_in(&sandbox, &slow)
        .ok()
        .prints(&["at least 0.000001 of the link's, of 2 measured sizes "]);
    sandbox.write("others.json", line(4, 1024, 1.0).as_bytes());
    let none = bench_in(&sandbox, &format!("{flags} --compare others.json --expect 0.9"));
    none.refused(&["--expect 0.9: ", "has no all_reduce of these sizes"]);
}

/// A Python that says that it has PyTorch, and does this as a rank. `$lines` is the file of the times.
fn python(sandbox: &Sandbox, name: &str, rank: &str) {
    let script = format!(
        "#!/bin/sh\ncase \"$2\" in *torch.__version__*) echo torch 9.8.7+cpu True; exit;; esac\n\
         lines=$(printf %s \"$3\" | sed 's/.*\"lines\":\"\\([^\"]*\\)\".*/\\1/')\n{rank}\n"
    );
    sandbox.write(name, script.as_bytes());
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(sandbox.path(name), mode).unwrap();
}

#[test]
fn another_program_is_measured_in_turns() {
    let sandbox = Sandbox::new();
    let line =
        "echo '{\"side\": \"x\", \"ranks\": 2, \"bytes\": '$1', \"ms\": 1000}' >> \"$lines\"";
    let times = format!("set -- 1024 2048\ntest $RANK = 1 && exit\n{line}\nshift\n{line}");
    python(&sandbox, "python", &times);
    let flags =
        format!("all_reduce {SHORT} --nproc 2 -b 1K -e 2K --against torch --python ./python");
    for transport in ["thread", "shm"] {
        let flags = format!("{flags} --transport {transport} -J run.json --charts charts");
        let run = bench_in(&sandbox, &flags).ok();
        run.prints(&["# in turns with torch 9.8.7 over gloo, one thread for each rank\n"]);
        assert_eq!(rows(&run).iter().filter(|row| row.len() == 13 && row[2] == "float").count(), 6);
        let compared = run.stdout.lines().filter(|line| line.starts_with(&format!("{transport} ")));
        let compared: Vec<&str> = compared.collect();
        assert!(compared.len() == 2 && compared[1].contains("  1000.0000  "), "{run:#?}");
        assert!(compared.iter().all(|line| line.contains(" to ")), "{run:#?}");
        let theirs = &json(&sandbox.path("run.json"))["against"];
        assert_eq!(theirs.as_array().unwrap().len(), 6);
        assert_eq!(
            (&theirs[5]["name"], &theirs[5]["bytes"]),
            (&"torch 9.8.7".into(), &2048.into())
        );
    }
    for (rank, said) in [
        ("exit 0", "./python: it ended with 0 of 2 times"),
        ("echo oops >&2; exit 7", "./python: a rank failed; its messages are above"),
        ("echo garbage >> \"$lines\"", "./python: expected value"),
    ] {
        python(&sandbox, "python", rank);
        bench_in(&sandbox, &flags).ended_with(1, &["--against torch: ", said]);
    }
    std::fs::create_dir(sandbox.path("folder")).unwrap();
    sandbox.write("yes", b"#!/bin/sh\nexec yes\n");
    sandbox.write("old", b"#!/bin/sh\necho torch '1.0\x1b[31m' False\n");
    for (name, said) in [
        ("folder", "folder cannot be started (Permission denied"),
        ("yes", "yes cannot import torch; "),
        ("old", "old has torch 1.0\\u{1b}[31m without gloo; "),
        ("none", "none cannot be started (No such file"),
    ] {
        let path = sandbox.path(name);
        if path.exists() {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(&path, mode).unwrap();
        }
        let run = bench_in(
            &sandbox,
            &format!("{flags} --python ./{name}").replacen(" --python ./python", "", 1),
        );
        run.refused(&["--against torch: ", said, "pass --python PATH"]);
    }
}

/// PyTorch itself, in the Python that `PACELINE_TORCH` names, checks its results and gives a time for each size.
#[test]
fn every_operation_of_pytorch_is_measured() {
    let Some(python) = torch() else { return };
    let python = python.display();
    for (op, flags) in [
        ("all_reduce", "-d float -o sum --pin-cores"),
        ("reduce_scatter", "-d bfloat16 -o prod"),
        ("reduce", "-d uint8 -o max"),
        ("all_gather", "-d double"),
        ("broadcast", "-d half"),
        ("gather", "-d int32"),
        ("scatter", "-d int64"),
        ("all_to_all", "-d float"),
        ("send_recv", "-d bfloat16"),
    ] {
        let flags = format!("{op} {flags} {SHORT} --nproc 2 -r 1 -b 8 -e 8000 -f 1000 -m 2 -N 1");
        let run = bench(&format!("{flags} --against torch --python {python}")).ok();
        let compared = run.stdout.lines().filter(|line| line.starts_with("shm   torch "));
        assert_eq!(compared.count(), 2, "{run:#?}");
    }
}
