//! Lists that PyTorch has written (`_dump_csv` of PyTorch 2.15, four ranks, eight micro-batches), and what is wrong with others.

use std::fs;

use paceline_schedule::{Costs, Plan, Timeline};

fn written(name: &str) -> String {
    fs::read_to_string(format!("{}/tests/pytorch/{name}.csv", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// How long a step takes if the forward pass and both halves of the backward pass take 1.
fn makespan(text: &str) -> f64 {
    let plan = Plan::of_csv(text).unwrap();
    Timeline::of(&plan, &Costs::even(&plan.shape().placement, 1.0, 1.0, 1.0)).unwrap().makespan
}

/// Without and with messages, they take as long as the papers say.
#[test]
fn lists_of_all_classes_are_read_and_counted() {
    for (name, expected) in [
        ("ScheduleGPipe", 33.0),
        ("ScheduleLoopedBFS", 28.5),
        ("ScheduleInterleaved1F1B", 28.5),
        ("ScheduleInterleavedZeroBubble", 25.5),
        ("ScheduleZBVZeroBubble", 25.5),
        // PyTorch sends the messages of a pair after both passes.
        ("ScheduleDualPipeV", 27.0),
    ] {
        for form in [name.to_owned(), format!("{name}_comms")] {
            assert_eq!(makespan(&written(&form)), expected, "{form}");
        }
    }
}

/// The plan that PyTorch 2.15 prints for 1F1B gives the last rank a backward pass first. It runs other code.
#[test]
fn pytorchs_own_plan_of_1f1b_is_wrong() {
    assert_eq!(
        problem(&written("Schedule1F1B")),
        "3B0 in the list of rank 3: its forward pass does not come before it (3B0 is rank 3, column 2)"
    );
}

fn problem(text: &str) -> String {
    Plan::of_csv(text).unwrap_err().to_string()
}

/// A list with another text in place of one of its cells, or with a cell moved.
fn edited(text: &str, from: &str, to: &str) -> String {
    assert_eq!(text.matches(from).count(), 1, "{from}");
    text.replace(from, to)
}

#[test]
fn faults_are_named_with_rank_column_and_action() {
    let passes = "0F0,0F1,0B0,0F2,0B1,0B2\r\n,1F0,1B0,1F1,1B1,1F2,1B2\r\n";
    assert_eq!(makespan(passes), 12.0);
    let messages = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                    1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n";
    assert_eq!(makespan(messages), 9.0);
    for (text, from, to, words) in [
        (
            passes,
            "0B1",
            "0B0",
            "0B0 in the list of rank 0: it is there twice (0B0 is rank 0, column 5)",
        ),
        (
            passes,
            "0F2",
            "0F7",
            "0F7 in the list of rank 0: there is no such stage or micro-batch (0F7 is rank 0, column 4)",
        ),
        (
            passes,
            "1F1,1B1",
            "1B1,1F1",
            "1B1 in the list of rank 1: its forward pass does not come before it (1B1 is rank 1, column 4)",
        ),
        (passes, ",1B2", "", "1B2 in the list of rank 1: it is missing"),
        (
            passes,
            ",0F2",
            ",1F2",
            "1F2 in the list of rank 0: another rank has this stage (1F2 is rank 0, column 4)",
        ),
        (passes, "0F2", "2G2", "rank 0, column 4: \"2G2\" is not an action like 2F0 or 1SEND_B3"),
        (
            passes, "0F1,0B0", "0B0,0F1",
            // The first pass of rank 1 waits for nothing else.
            "",
        ),
        (
            passes,
            "1B0,1F1",
            "1F1,1F2,1B0",
            "1F2 in the list of rank 1: it is there twice (1F2 is rank 1, column 7)",
        ),
        (messages, "0SEND_F1,", "", "0SEND_F1 in the list of rank 0: it is missing"),
        (
            messages,
            "1RECV_F1,1B0,1SEND_B0,1F1",
            "1B0,1SEND_B0,1F1,1RECV_F1",
            "1RECV_F1 in the list of rank 1: it does not come before the pass that needs it (1RECV_F1 is rank 1, column 6)",
        ),
        (
            messages,
            "1RECV_F0,1F0,1RECV_F1",
            "1RECV_F1,1RECV_F0,1F0",
            "rank 0 sends 0SEND_F0 where rank 1 awaits 1RECV_F1; messages between two ranks are received in the order in which they are \
             sent (0SEND_F0 is rank 0, column 2; 1RECV_F1 is rank 1, column 1)",
        ),
        (messages, "0F1,0SEND_F1,0RECV_B0,0B0", "0RECV_B0,0B0,0F1,0SEND_F1", ""),
        (
            messages,
            "0SEND_F0,",
            "0SEND_F0,0WAIT_SEND_F0,",
            "0SEND_F1 in the list of rank 0: its WAIT_SEND is missing (0SEND_F1 is rank 0, column 5)",
        ),
    ] {
        let edited = edited(text, from, to);
        if words.is_empty() {
            Plan::of_csv(&edited).unwrap();
        } else {
            assert_eq!(problem(&edited), words, "{edited}");
        }
    }
}

#[test]
fn deadlocks_name_who_waits_for_what_and_where() {
    // Rank 1 needs the second micro-batch before it goes back, and rank 0 goes back first.
    assert_eq!(
        problem("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"),
        "the ranks wait for each other: rank 0 cannot do 0B0 before 1B0 of rank 1, rank 1 cannot do 1F1 before 0F1 of rank 0 (0B0 is \
         rank 0, column 2; 1B0 is rank 1, column 3; 1F1 is rank 1, column 2; 0F1 is rank 0, column 3)"
    );
    // Each waits until its message has left before it receives the other's.
    let waits = "0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F0,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                 1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B1\n";
    assert_eq!(
        problem(waits),
        "the ranks wait for each other: rank 0 cannot do 0WAIT_SEND_F1 before 1RECV_F1 of rank 1, rank 1 cannot do 1WAIT_SEND_B0 before \
         0RECV_B0 of rank 0 (0WAIT_SEND_F1 is rank 0, column 6; 1RECV_F1 is rank 1, column 6; 1WAIT_SEND_B0 is rank 1, column 5; 0RECV_B0 is \
         rank 0, column 7)"
    );
}

#[test]
fn files_that_are_no_lists_are_refused_at_once() {
    for (text, words) in [
        ("", "there is no pass in it"),
        ("\n\n\n", "there is no pass in it"),
        (",,,\n", "there is no pass in it"),
        ("0F0,\x1b[31m", "rank 0, column 2: \"\\u{1b}[31m\" is not an action"),
        ("0F0,99999999999999999999F0", "is not an action"),
        ("0F0,9999999F0", "9999999F0 in the list of rank 0: there is no pass of a stage before it"),
        ("0F99999999,0B99999999", "there is no such stage or micro-batch"),
        ("0F0,0B0\n\n1F0,1B0", "3 rows (one for each rank) for 2 stages"),
        ("0F0,0B0,1F0,1B0\n2F0,2B0,3F0,3B0", "stage 1 is on rank 0"),
        ("(0F0)OVERLAP_F_B", "is not an action"),
        ("(0F0;0SEND_F0)OVERLAP_F_B", "0F0 and 0SEND_F0 are no pair of passes"),
        ("UNSHARD,0F0", "\"UNSHARD\" is not an action"),
    ] {
        assert!(problem(text).contains(words), "{text:?}: {}", problem(text));
    }
    let tall: String = (0..2000).map(|at| format!("{at}F0,{at}B0\n")).collect();
    assert!(problem(&tall).contains("more than 1024 rows"));
    assert!(problem(&"0F0,".repeat(1 << 21)).contains("column 1048577: more than a million cells"));
    let wide: String = (0..600_000).map(|at| format!("0F{at},")).collect();
    let wide = format!("{wide}\n{}", wide.replace("0F", "1F"));
    assert!(problem(&wide).contains("more than a million cells"), "{}", problem(&wide));
}
