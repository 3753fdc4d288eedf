//! `paceline record --watch-hang`, with a stand-in for PyTorch.

use std::fs;

use crate::common::{Sandbox, fifo, wait_until};
use crate::record::sandbox;

/// Two ranks, the first of which waits in its second call. The second one has made one call, and does `second`. Returns the output up to the
/// moment at which `is_over`, when both go on.
fn watched(second: &str, is_over: impl Fn(&Sandbox, &str) -> bool) -> Option<String> {
    let sandbox = sandbox()?;
    let code = format!(
        "import os, subprocess, sys, time\nif 'RANK' not in os.environ:\n    \
         ranks = [subprocess.Popen([sys.executable, 'ranks.py'], env={{**os.environ, 'RANK': str(rank), 'WORLD_SIZE': '2'}}) for rank in range(2)]\n    \
         print([rank.wait() for rank in ranks])\nelse:\n    import torch\n    torch.init_process_group()\n    \
         rank = int(os.environ['RANK'])\n    torch.calls.made, torch.calls.ended = 2 - rank, 1\n    \
         def rest(): open('go').read()\n    rest() if rank == 0 else {second}\n"
    );
    sandbox.write("ranks.py", code.as_bytes());
    fifo(&sandbox.path("go"));
    let mut command = sandbox.given("record --watch-hang 1 -- python3 ranks.py");
    command.env("PYTHONPATH", sandbox.path("lib")).env("TMPDIR", sandbox.path("tmp"));
    let said = || fs::read_to_string(sandbox.path("said")).unwrap();
    let mut running =
        command.stdout(fs::File::create(sandbox.path("said")).unwrap()).spawn().unwrap();
    wait_until("the end of the watch", || is_over(&sandbox, &said()));
    let before = said();
    let _go = fs::OpenOptions::new().write(true).open(sandbox.path("go")).unwrap();
    sandbox.write("gone", b"");
    drop(_go);
    wait_until("the end of the program", || running.try_wait().unwrap().is_some());
    assert!(said().contains("[0, 0]"), "{}", said());
    assert_eq!((sandbox.names("tmp"), sandbox.path("paceline-hang").exists()), (vec![], false));
    Some(before)
}

#[test]
fn a_job_that_hangs_is_explained_while_it_runs() {
    let has_answer = |_: &Sandbox, said: &str| said.contains("The program still runs");
    let Some(said) = watched("rest()", has_answer) else { return };
    for words in [
        "The job hangs: for 1 s, none of 2 ranks has made or ended a call, and some wait in one",
        "Rank 1 has not made the call all_reduce #2 of group 0 (default_pg)",
        "/ranks.py:10 in rest",
        "rank 0, in all_reduce #2 of group 0 (default_pg), for rank 1",
    ] {
        let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(words) || said.contains(words), "{words}: {said}");
    }
}

#[test]
fn a_rank_that_works_while_others_wait_is_slow() {
    let spin = "while not os.path.exists(\"gone\"): pass";
    for second in [
        format!("exec('{spin}')"),
        format!("subprocess.run([sys.executable, '-c', 'import os\\n{spin}'])"),
        "[time.sleep(0.05) for _ in iter(lambda: os.path.exists('gone'), True)]".to_owned(),
    ] {
        // Several times the limit.
        let is_over = |sandbox: &Sandbox, _: &str| {
            let last = sandbox.path("paceline-hang/rank_1.watch");
            let looks = fs::read_to_string(last).unwrap_or_default();
            let looks = looks.split("\"looks\": ").nth(1).and_then(|of| of.split(',').next());
            looks.is_some_and(|of| of.parse::<u32>().unwrap() > 50)
        };
        let Some(said) = watched(&second, is_over) else { return };
        assert!(!said.contains("hangs"), "{second}: {said}");
    }
}
