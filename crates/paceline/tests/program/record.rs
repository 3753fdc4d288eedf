//! `paceline record`: Python programs run as without it, their steps are recorded, and the end says what came.
//!
//! `record/torch.py` stands in for PyTorch, so that these tests need only `python3`. With the variable `PACELINE_TORCH`, which
//! names a Python that has PyTorch, the last test records that too.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::common::{Run, Running, Sandbox, fifo, signal, torch};

/// A folder with the stand-in for PyTorch. `None`, with a line that says so, if there is no Python.
pub(super) fn sandbox() -> Option<Sandbox> {
    let python = Command::new("python3").arg("--version").output();
    if !python.is_ok_and(|python| python.status.success()) {
        println!("skipped: there is no python3 here");
        return None;
    }
    let sandbox = Sandbox::new();
    sandbox.write("lib/torch.py", include_bytes!("record/torch.py"));
    fs::create_dir(sandbox.path("tmp")).unwrap();
    Some(sandbox)
}

/// `paceline record FLAGS -- python3 PYTHON -c CODE`.
fn command(sandbox: &Sandbox, flags: &str, python: &[&str], code: &str) -> Command {
    let mut command = sandbox.given(&format!("record {flags} -- python3"));
    command.args(python).args(["-c", code]);
    command.env("PYTHONPATH", sandbox.path("lib")).env("TMPDIR", sandbox.path("tmp"));
    command.env_remove("PYTHONSTARTUP").env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

fn record(sandbox: &Sandbox, flags: &str, code: &str) -> Run {
    let run = Run::of(command(sandbox, flags, &[], code));
    assert_eq!(sandbox.names("tmp"), [""; 0], "something is left: {run:#?}");
    run
}

/// The traces below a folder.
fn traces(sandbox: &Sandbox, folder: &str) -> Vec<String> {
    let of_folder = |path: &String| path.starts_with(&format!("{folder}/"));
    let files = sandbox.contents().into_iter().filter(of_folder);
    files.filter(|path| sandbox.path(path).is_file()).collect()
}

const TRAIN: &str = "import torch; torch.train(40)";

#[test]
fn steps_are_recorded_and_analyzed() {
    let Some(sandbox) = sandbox() else { return };
    let run = record(&sandbox, "", TRAIN).ok();
    assert!(run.stdout.starts_with("trained 40 steps\n\nRecorded 5 steps of 1 rank"), "{run:#?}");
    run.prints(&[
        "with PyTorch 2.9.0: paceline-traces/",
        "1 rank · 5 of 6 steps (1 to 5)",
        "Report: reports",
    ]);
    assert_eq!(run.stderr, "");
    let found = traces(&sandbox, "paceline-traces");
    let [trace] = &found[..] else { panic!("{found:?}") };
    let name = trace.strip_prefix("paceline-traces/rank_0/").unwrap();
    assert!(name.contains('_') && name.ends_with(".pt.trace.json"), "{name}");
    // No span of an optimizer step crosses the end of a step.
    let trace = crate::common::json(&sandbox.path(trace));
    let lengths = trace["unrecorded_steps_ms"].as_str().unwrap();
    let lengths: Vec<f64> = lengths.split(' ').map(|ms| ms.parse().unwrap()).collect();
    assert!(lengths.len() == 16 && lengths.iter().all(|ms| *ms >= 1.0), "{lengths:?}");
    run.prints(&["ms before the recording and "]);
    let speeds = trace["speeds"].as_str().unwrap().split(' ');
    let speeds: Vec<f64> = speeds.map(|of| of.parse().unwrap()).collect();
    assert!(speeds.len() == 2 && speeds.iter().all(|of| *of > 1e6), "{speeds:?}");
    let events = trace["traceEvents"].clone();
    let span = |event: &serde_json::Value| {
        let [begin, us] = ["ts", "dur"].map(|key| event[key].as_f64().unwrap());
        (event["name"].as_str().unwrap().to_owned(), begin, begin + us)
    };
    let spans: Vec<_> = events.as_array().unwrap().iter().map(span).collect();
    let steps: Vec<_> = spans.iter().filter(|span| span.0.starts_with("ProfilerStep#")).collect();
    assert_eq!(
        steps.iter().map(|span| span.0.as_str()).collect::<Vec<_>>(),
        [1, 2, 3, 4, 5, 6].map(|at| format!("ProfilerStep#{at}"))
    );
    for step in &steps {
        let within = |span: &&(String, f64, f64)| {
            span.0.starts_with("Optimizer") && step.1 < span.1 && span.2 < step.2
        };
        assert_eq!(spans.iter().filter(within).count(), 1, "{step:?} in {spans:?}");
    }
    // Traces of two recordings do not mix.
    record(&sandbox, "--after 1 --steps 2", TRAIN)
        .ok()
        .prints(&["Recorded 2 steps", "paceline-traces-2/"]);
    record(&sandbox, "--output paceline-traces", TRAIN)
        .refused(&["--output paceline-traces", "pass a new one"]);
}

#[test]
fn a_program_runs_as_without_us() {
    let Some(sandbox) = sandbox() else { return };
    let code = "import sys, os, resource, signal\nprint(sys.path, 'sitecustomize' in sys.modules, len(sys.meta_path), \
                resource.getrlimit(resource.RLIMIT_NOFILE), signal.getsignal(signal.SIGINT), sys.stdin.read())\n\
                import torch\nprint(type(torch.__loader__), len(sys.meta_path))\nsys.stderr.write('aside')\ntorch.train(30)\nsys.exit(7)";
    let plain = |own: &str| {
        let mut plain = sandbox.command("python3".as_ref());
        plain.args(["-c", code]).env("PYTHONPATH", own).env("PYTHONDONTWRITEBYTECODE", "1");
        plain.env("TMPDIR", sandbox.path("tmp"));
        Run::of(plain)
    };
    let lib = sandbox.path("lib").to_str().unwrap().to_owned();
    sandbox.write("torch.py", include_bytes!("record/torch.py"));
    for own in [
        lib.clone(),
        format!("{lib}::/nowhere"),
        format!(":{lib}"),
        format!("{lib}:"),
        String::new(),
    ] {
        let mut command = command(&sandbox, "--output out", &[], code);
        let recorded = Run::of({
            command.env("PYTHONPATH", &own);
            command
        });
        fs::remove_dir_all(sandbox.path("out")).unwrap();
        let plain = plain(&own);
        assert_eq!((plain.code, recorded.code), (Some(7), Some(7)), "{recorded:#?}");
        let (said, ours) = recorded.stdout.split_once("\n\nRecorded 5 steps").unwrap();
        // Until torch is imported, one finder more waits for it.
        let finders = plain.stdout.lines().nth(1).and_then(|line| line.rsplit(' ').next()).unwrap();
        let more = (finders.parse::<usize>().unwrap() + 1).to_string();
        let said = said.replacen(&format!("False {more} ("), &format!("False {finders} ("), 1);
        assert_eq!(format!("{said}\n"), plain.stdout, "{own}");
        assert_eq!(recorded.stderr, plain.stderr, "{own} {ours}");
    }
}

#[test]
fn the_users_sitecustomize_runs() {
    let Some(sandbox) = sandbox() else { return };
    let code = "import sys, torch; torch.train(30); print(sys.modules['sitecustomize'].__file__)";
    sandbox.write("lib/sitecustomize.py", b"print('mine')");
    let run = record(&sandbox, "", code).ok();
    assert!(run.stdout.starts_with("mine\ntrained"), "{run:#?}");
    run.prints(&["lib/sitecustomize.py\n", "Recorded 5 steps"]);
    // Its error is reported as Python does, and the program runs.
    sandbox.write("lib/sitecustomize.py", b"import nowhere");
    let run = record(&sandbox, "", "import torch; torch.train(30)").ok();
    run.says(&["Error in sitecustomize", "No module named 'nowhere'"])
        .prints(&["Recorded 5 steps"]);
}

#[test]
fn the_end_says_why_nothing_was_recorded() {
    let Some(sandbox) = sandbox() else { return };
    let own = "def own(at):\n    global p\n    if at == 3: p = torch.autograd.profiler.profile().__enter__()\n";
    for (python, code, words) in [
        (&["-S"][..], TRAIN, "has started with the recorder. python -S, -E and -I"),
        (&["-I"], "print(1)", "no Python has started with the recorder"),
        (&["-E"], "print(1)", "paceline record --print-hook"),
        (&[], "print(1)", "has not imported PyTorch"),
        (
            &[],
            "import torch",
            "made no optimizer step, or made them in processes without the recorder",
        ),
        (
            &[],
            "import torch; torch.train(12)",
            "made 12 optimizer steps, and --after 20 waits for more; pass --after 6",
        ),
        (&[], "import torch; torch.train(20)", "made 20 optimizer steps, and --after 20 waits"),
        (
            &[],
            "import torch; torch.train(4)",
            "made 4 optimizer steps; a recording of 5 needs more",
        ),
        (&[], "import torch, os; torch.train(9); os._exit(0)", "made at least 8 optimizer steps"),
        (&[], &format!("import torch\n{own}torch.train(40, own)"), "own profiler was running"),
        (
            &[],
            "import os; os.environ['DISK'] = 'full'; import torch; torch.train(40)",
            "is the disk full?",
        ),
        (
            &[],
            "import torch; torch.profiler.supported_activities = None; torch.train(40)",
            "TypeError: 'NoneType' object is not callable",
        ),
        (
            &[],
            "import os; open('paceline-traces/rank_0', 'w'); import torch; torch.train(40)",
            "FileExistsError",
        ),
    ] {
        let folder = Sandbox::new();
        let mut command = command(&sandbox, "", python, code);
        command.current_dir(folder.path(""));
        let run = Run::of(command).ok();
        let flat = run.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            flat.starts_with("warning: nothing was recorded: ") && flat.contains(words),
            "{code}: {run:#?}"
        );
        assert!(!run.stdout.contains("Report"), "{run:#?}");
        assert!(!folder.contents().iter().any(|path| path.contains(".part")), "{run:#?}");
    }
}

#[test]
fn a_pytorch_without_the_hook_is_too_old() {
    let Some(sandbox) = sandbox() else { return };
    let text = fs::read_to_string(sandbox.path("lib/torch.py")).unwrap();
    let old = text.replace("optim.optimizer.register", "optim.optimizer.lacks");
    sandbox.write("lib/torch.py", old.as_bytes());
    record(&sandbox, "", TRAIN).ok().says(&["PyTorch 2.9.0 lacks what this needs"]);
}

#[test]
fn steps_are_those_of_the_optimizer_that_is_first() {
    let Some(sandbox) = sandbox() else { return };
    // Two optimizers take turns, another has ended before, and a hook of the program's own comes after ours.
    let code = "import torch\nseen = []\ntorch.train(10)\n\
                a, b = torch.optim.SGD(), torch.optim.SGD()\n\
                torch.register_optimizer_step_post_hook(lambda *_: seen.append(1))\n\
                for _ in range(30): a.step(); b.step()\nprint(len(seen))";
    let run = record(&sandbox, "", code).ok();
    run.prints(&["\n60\n", "Recorded 5 steps", "5 of 6 steps (1 to 5)"]);
    let trace = fs::read_to_string(sandbox.path(&traces(&sandbox, "paceline-traces")[0])).unwrap();
    assert_eq!(trace.matches("Optimizer.step#SGD.step").count(), 12, "{trace}");
    // The optimizer that divides the recording makes no further step.
    let code = "import torch; a = torch.optim.SGD()\nfor _ in range(23): a.step()\ntorch.train(30)\nprint('end')";
    record(&sandbox, "", code)
        .ok()
        .says(&["has recorded 3 steps of 5"])
        .prints(&["end\n\nRecorded 3 steps"]);
}

#[test]
fn the_programs_own_profiler_goes_first() {
    let Some(sandbox) = sandbox() else { return };
    let own = |begin: u32, end: u32| {
        format!(
            "import torch\ndef own(at):\n    global p\n    if at == {begin}:\n        p = torch.autograd.profiler.profile()\n        \
             p._prepare_trace()\n    if at == {begin} + 3: p._start_trace()\n    if at == {end}:\n        p.__exit__(None, None, None)\n        \
             print(len(p.events))\ntorch.train(80, own)"
        )
    };
    // It runs, or is prepared, before ours would begin; it begins within ours, or within its warm-up.
    for begin in [3, 18, 17, 21, 19] {
        let flags = format!("--output out{begin}");
        let run = record(&sandbox, &flags, &own(begin, 30)).ok();
        // Two spans and an operator in each step from its start.
        let events = format!("{}\ntrained", 3 * (30 - begin - 3));
        run.prints(&[&events, "Recorded 5 steps", "5 of 6 steps (1 to 5)"]);
        assert_eq!(run.stderr, "");
    }
    // A program that marks steps for a profiler that waits.
    let code = "import torch\np = torch.profiler.profile(schedule=(-1, 0))\np.start()\ntorch.train(40, lambda at: p.step())";
    record(&sandbox, "", code).ok().prints(&["5 of 6 steps (1 to 5)"]);
}

#[test]
fn the_programs_own_profiler_leaves_no_mark_but_one_note() {
    let Some(sandbox) = sandbox() else { return };
    // It begins within ours, and marks steps.
    let code = "import torch\np = torch.profiler.profile(schedule=(0, 3), on_trace_ready=lambda p: print([event['name'] for event in \
                p.profiler.events if 'Step#' in event['name']]))\ndef own(at):\n    if at == 22: p.start()\n    \
                if 22 < at < 27: p.step()\ntorch.train(60, own)";
    let run = record(&sandbox, "", code).ok();
    run.prints(&["['ProfilerStep#0', 'ProfilerStep#1', 'ProfilerStep#2']", "Recorded 5 steps"]);
    // It runs to the end, and is noted again where steps are.
    let code = "import glob, os, torch\ndef own(at):\n    global p\n    if at == 3: p = torch.autograd.profiler.profile().__enter__()\n\
                torch.train(60, own)\nnotes = glob.glob(os.environ['TMPDIR'] + '/*/*.note')\nprint(open(notes[0]).read().count('own profiler was running'))";
    record(&sandbox, "", code).ok().prints(&["\n2\n"]).says(&["own profiler was running"]);
}

#[test]
fn a_profiler_is_called_only_where_that_is_safe() {
    let Some(sandbox) = sandbox() else { return };
    let place = "within the backward pass, in a daemon thread or each in a new one";
    for (name, code, out, err) in [
        ("backward", "torch.backward = 0; torch.train(40)", "trained 40", place),
        ("daemon", "start(daemon=True)", "trained 23", place),
        ("ends", "start()", "Recorded 3 steps", "has recorded 3 steps of 5"),
        ("both", "start(); start()", "Recorded", ""),
        ("turns", "a = torch.optim.SGD()\nfor _ in range(60): start(a.step, ())", "", place),
        ("stop", "start(args=(40,))", "trained 40", "--stop cannot end the program"),
    ] {
        let code = format!(
            "import torch, threading\ndef start(target=torch.train, args=(23,), **how):\n    \
             thread = threading.Thread(target=target, args=args, **how)\n    thread.start(); thread.join()\n{code}"
        );
        let flags = format!("--output {name} {}", if name == "stop" { "--stop" } else { "" });
        record(&sandbox, &flags, &code).ok().prints(&[out]).says(&[err]);
    }
}

#[test]
fn processes_that_share_a_rank_or_are_killed_are_named() {
    let Some(sandbox) = sandbox() else { return };
    let code = "import os, torch\nif os.fork(): os.wait()\ntorch.train(40)";
    let run = record(&sandbox, "", code).ok();
    run.prints(&["Recorded 5 steps of 1 rank"]).says(&["2 processes have recorded as 1 rank"]);
    let run = record(
        &sandbox,
        "",
        "import torch, os; torch.train(40, lambda at: at == 22 and os._exit(3))",
    );
    run.ended_with(3, &["nothing was recorded: it was killed while it recorded"]);
}

#[test]
fn recordings_that_begin_together_take_different_folders() {
    let Some(sandbox) = sandbox() else { return };
    let code = "import glob, time, torch\nopen(f'ready{__import__(\"os\").getpid()}', 'w')\n\
                for _ in range(10**4):\n    if len(glob.glob('ready*')) < 2: time.sleep(0.01)\ntorch.train(40)";
    let both = [(); 2].map(|()| Running::start(command(&sandbox, "", &[], code)));
    for one in both {
        one.end().ok().prints(&["Recorded 5 steps"]);
    }
    for folder in ["paceline-traces", "paceline-traces-2"] {
        assert_eq!(traces(&sandbox, folder).len(), 1, "{folder}");
    }
    // Nothing is left of a recording that did not come about.
    record(&sandbox, "", "print(1)").ok();
    assert!(!sandbox.path("paceline-traces-3").exists());
}

#[test]
fn every_rank_is_recorded_and_stop_ends_them() {
    let Some(sandbox) = sandbox() else { return };
    // A rank for each number, in processes as torchrun and mp.spawn start them; the fork records nothing of its own.
    let code = "import os, sys, subprocess\nif 'RANK' not in os.environ:\n    \
                ranks = [subprocess.Popen([sys.executable, sys.argv[1]], env={**os.environ, 'RANK': str(rank)}) for rank in range(3)]\n    \
                print([rank.wait() for rank in ranks])\nelse:\n    import torch\n    def own(at):\n        \
                if at == 22 and os.fork() == 0: torch.train(3); sys.exit(0)\n    \
                try: torch.train(200, own)\n    except Exception: print('caught')\n    finally: print('finally', flush=True)\n";
    sandbox.write("ranks.py", code.as_bytes());
    let mut command = sandbox.given("record --stop -- python3 ranks.py ranks.py");
    command.env("PYTHONPATH", sandbox.path("lib")).env("TMPDIR", sandbox.path("tmp"));
    let run = Run::of(command).ok();
    run.prints(&[
        "[0, 0, 0]",
        "finally",
        "Recorded 5 steps of 3 ranks",
        "3 ranks · 5 of 6 steps (1 to 5)",
    ]);
    assert!(!run.stdout.contains("trained 200") && run.stderr.is_empty(), "{run:#?}");
    let folders: Vec<_> =
        traces(&sandbox, "paceline-traces").iter().map(|path| path[16..22].to_owned()).collect();
    assert_eq!(folders, ["rank_0", "rank_1", "rank_2"]);
}

#[test]
fn hosts_record_into_one_folder() {
    let Some(sandbox) = sandbox() else { return };
    // Ranks that train together begin once all hosts have started, and are there when the first one ends.
    let code = "import glob, os, time, torch\nopen('ready' + os.environ['RANK'], 'w')\n\
                def wait(pattern):\n    for _ in range(10**4):\n        if len(glob.glob(pattern)) < 2: time.sleep(0.01)\n\
                wait('ready*'); torch.train(40); wait('shared/rank_*/*.json')";
    let start = |rank: &str| {
        let mut command = command(&sandbox, "--output shared", &[], code);
        command.env("RANK", rank);
        Running::start(command)
    };
    let hosts = ["0", "1"].map(start);
    for host in hosts {
        let run = host.end().ok();
        run.prints(&["Recorded 5 steps of 1 rank", "2 ranks · 5 of 6 steps (1 to 5)"]);
    }
}

#[test]
fn a_time_is_recorded_without_an_optimizer() {
    let Some(sandbox) = sandbox() else { return };
    let code = "import torch, time\nend = time.time() + 2\n\
                while time.time() < end:\n    with torch.record_function('aten::mm'): time.sleep(0.01)";
    let run = record(&sandbox, "--after 0 --seconds 0.2", code).ok();
    run.prints(&["Recorded 0.", " s of 1 rank", "no steps"]);
    // The program ends before the time is over, or before it has begun.
    let run = record(&sandbox, "--after 0 --seconds 100", code).ok();
    run.prints(&["Recorded ", " s of 1 rank"]);
    record(&sandbox, "--after 100 --seconds 1", code)
        .ok()
        .says(&["within 100 s after it imported PyTorch"]);
    // A launcher runs no operator, and a worker of a loader is no rank.
    let worker = "sys.modules['torch.utils.data'] = type(sys)('data'); sys.modules['torch.utils.data'].get_worker_info = lambda: 1";
    for code in [
        "end = time.time() + 2\nwhile time.time() < end: time.sleep(0.01)",
        &format!("{worker}\n{code}"),
    ] {
        let code = format!("import sys, time, torch\n{code}");
        let run = record(&sandbox, "--after 0 --seconds 0.2", &code).ok();
        run.says(&["nothing was recorded: ", "no operator ran"]);
        assert!(!run.stderr.contains("another program"), "{run:#?}");
    }
    // Modules that are being imported may lack parts.
    let slow = "import time, torch\ntorch.profiler.supported_activities = None\nend = time.time() + 1\n\
                while time.time() < end: pass\ntorch.profiler.supported_activities = lambda: {1}";
    sandbox.write("lib/slow.py", slow.as_bytes());
    let run =
        record(&sandbox, "--after 0 --seconds 0.2", &format!("import torch, slow\n{code}")).ok();
    run.prints(&["Recorded 0.", " s of 1 rank"]);
}

#[test]
fn a_signal_reaches_the_program_once() {
    let Some(sandbox) = sandbox() else { return };
    // Each arrival leaves a byte in the pipe, even of signals that Python's handler sees as one.
    let code = "import os, signal, sys, time\nfor one in (signal.SIGTERM, signal.SIGUSR1): signal.signal(one, lambda *_: None)\nends = os.pipe()\nos.set_blocking(ends[1], False)\n\
                signal.set_wakeup_fd(ends[1])\nopen('ready', 'w')\nseen = os.read(ends[0], 1)\ntime.sleep(1.5)\n\
                os.write(ends[1], b'.')\nprint('seen', len(seen + os.read(ends[0], 9)) - 1, flush=True)\nsys.exit(7)";
    for (signal, is_group) in
        [(Signal::TERM, true), (Signal::TERM, false), (Signal::USR1, true), (Signal::USR1, false)]
    {
        let mut command = command(&sandbox, "", &[], code);
        command.process_group(0);
        let mut running = Running::start(command);
        running.wait_until("a handler", || sandbox.path("ready").exists());
        let pid = Pid::from_raw(running.id() as i32).unwrap();
        let sent = if is_group { kill_process_group } else { kill_process };
        sent(pid, signal).unwrap();
        running.end().ended_with(7, &[]).prints(&["seen 1\n"]);
        fs::remove_file(sandbox.path("ready")).unwrap();
    }
}

#[test]
fn a_crash_or_a_signal_keeps_its_exit_code_and_the_traces() {
    let Some(sandbox) = sandbox() else { return };
    let run = record(&sandbox, "", "import torch; torch.train(23); 1 / 0");
    run.ended_with(1, &["ZeroDivisionError", "rank 0 has recorded 3 steps of 5"])
        .prints(&["Report: "]);
    let run = record(&sandbox, "", "import os, torch; torch.train(30); os.kill(os.getpid(), 9)");
    run.ended_with(137, &[]).prints(&["Recorded 5 steps"]);
    // A program may clear the folder of temporary files.
    let clears = "import os, sys, shutil; tmp = os.environ['TMPDIR']\nshutil.rmtree(f'{tmp}/{os.listdir(tmp)[0]}')\n\
                  import torch; torch.train(40); sys.exit(7)";
    let run = record(&sandbox, "", clears);
    run.ended_with(7, &["warning: cannot read the notes in"]);
    // Notes that are no file, or are gone, leave what the traces say.
    for (number, spoils) in
        ["os.mkfifo(f'{folder}/x.note')", "shutil.rmtree(folder)"].iter().enumerate()
    {
        let code = format!(
            "import os, sys, shutil, torch\ntmp = os.environ['TMPDIR']\nfolder = f'{{tmp}}/{{os.listdir(tmp)[0]}}'\n\
             torch.train(40)\n{spoils}\nsys.exit(7)"
        );
        let run = record(&sandbox, &format!("--output spoiled{number}"), &code);
        run.ended_with(7, &["warning: cannot read the notes in"]).prints(&["Report: "]);
    }
    let code = "import os, shutil, torch\ntmp = os.environ['TMPDIR']\ntorch.train(22)\nshutil.rmtree(f'{tmp}/{os.listdir(tmp)[0]}')\ntorch.train(40)";
    record(&sandbox, "--stop --output gone", code)
        .ended_with(0, &["warning: cannot read the notes in"]);
    for (sent, code) in [(Signal::INT, 130), (Signal::TERM, 7)] {
        let code_of = "import signal, sys, torch, os\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n\
                       torch.train(10**6, lambda at: at == 30 and open('ready', 'w'))";
        let mut running = Running::start(command(&sandbox, "", &[], code_of));
        running.wait_until("30 steps", || sandbox.path("ready").exists());
        signal(running.id(), sent);
        let run = running.end();
        run.ended_with(code, &[]).prints(&["Recorded 5 steps"]);
        fs::remove_file(sandbox.path("ready")).unwrap();
    }
}

#[test]
fn what_is_in_the_way_is_refused_before_the_program_starts() {
    let Some(sandbox) = sandbox() else { return };
    fifo(&sandbox.path("fifo"));
    std::os::unix::fs::symlink("nowhere", sandbox.path("link")).unwrap();
    sandbox.write("full/a", b"");
    let before = sandbox.contents();
    for flags in
        ["--output fifo", "--output link", "--output full", "--output full/a", "--output fifo/a"]
    {
        record(&sandbox, flags, TRAIN).refused(&["--output "]);
    }
    for (folder, words) in [("nowhere", "TMPDIR: cannot write"), ("a:b", "without a colon")] {
        let mut command = command(&sandbox, "", &[], TRAIN);
        command.env("TMPDIR", sandbox.path(folder));
        Run::of(command).refused(&[words]);
    }
    assert_eq!(sandbox.contents(), before);
    // A name that commands the terminal is shown, not obeyed.
    let command = command(&sandbox, "", &[], TRAIN);
    let words = ["record", "--output", "a\u{1b}[2J b", "--", "python3", "-c", TRAIN];
    let mut hostile = sandbox.paceline();
    hostile.args(words).envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let run = Run::of(hostile).ok();
    assert!(!run.stdout.contains('\u{1b}') && run.stdout.contains("Recorded 5"), "{run:#?}");
}

#[test]
fn a_program_can_start_the_recording_by_itself() {
    let Some(sandbox) = sandbox() else { return };
    let hook = sandbox.run("record --print-hook").ok().stdout;
    sandbox.write("lib/paceline_record.py", hook.as_bytes());
    for (name, code) in [
        (
            "before",
            "import paceline_record; paceline_record.start(after=3, steps=2, output='before'); import torch; torch.train(9)",
        ),
        (
            "after",
            "import torch; import paceline_record; paceline_record.start(after=3, steps=2, output='after'); torch.train(9)",
        ),
    ] {
        let mut python = sandbox.command("python3".as_ref());
        python.args(["-I", "-c", &format!("import sys; sys.path.insert(0, 'lib')\n{code}")]);
        let run = Run::of(python).ok();
        assert_eq!((run.stdout.as_str(), run.stderr.as_str()), ("trained 9 steps\n", ""));
        sandbox.run(&format!("analyze {name}")).ok().prints(&["2 of 3 steps (1 to 2)"]);
        // Recorded from outside too, it is recorded once.
        let run = record(&sandbox, &format!("--output {name}-2"), code).ok();
        run.says(&["made 9 optimizer steps, and --after 20"]);
    }
}

/// Two ranks of PyTorch itself, in the Python that `PACELINE_TORCH` names.
#[test]
fn pytorch_itself_is_recorded() {
    let Some(python) = torch() else { return };
    let sandbox = Sandbox::new();
    let code = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n\
                model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))\n\
                optimizer = torch.optim.AdamW(model.parameters())\nfor _ in range(30):\n    \
                model(torch.randn(8, 64)).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n\
                dist.destroy_process_group()\n";
    sandbox.write("train.py", code.as_bytes());
    for flags in [&["--stacks"][..], &["--stop", "--after", "2"]] {
        let mut command = sandbox.given("record --output out");
        command.args(flags).arg("--").arg(&python);
        command
            .args("-m torch.distributed.run --standalone --nproc-per-node 2 train.py".split(' '));
        let run = Run::of(command).ok();
        run.prints(&["Recorded 5 steps of 2 ranks", "2 ranks · 5 of 6 steps (1 to 5) · gloo"]);
        assert!(!run.stderr.contains("Traceback") && !run.stderr.contains("USDT"), "{run:#?}");
        fs::remove_dir_all(sandbox.path("out")).unwrap();
    }
}
