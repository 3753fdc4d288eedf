//! Lists that do not fit together.

use paceline_schedule::{Action, Costs, Entry, Placement, Plan, PlanError, Shape, named};

/// A plan of these lists for two ranks with a stage each, and two micro-batches.
fn plan(lists: [&str; 2]) -> Result<Plan, PlanError> {
    let shape = Shape { placement: Placement::line(2), micro_batches: 2 };
    let entries = |text: &str| {
        let actions = text.split_whitespace().map(|text| text.parse::<Action>().unwrap());
        actions.map(Entry::One).collect()
    };
    Plan::of_lists(shape, lists.map(entries).to_vec())
}

fn problem(lists: [&str; 2]) -> String {
    plan(lists).unwrap_err().to_string()
}

#[test]
fn a_plan_has_each_action_once_and_where_it_belongs() {
    let good = "1F0 1B0 1F1 1B1";
    plan(["0F0 0F1 0B0 0B1", good]).unwrap();
    plan(["0F0 0F1 0I0 0I1 0W0 0W1", good]).unwrap();
    for (list, words) in [
        ("0F0 0F1 0B0", "0B1 in the list of rank 0: it is missing"),
        ("0F0 0F1 0B0 0I1", "0W1 in the list of rank 0: it is missing"),
        ("0F0 0F1 0B0 0B1 0B1", "0B1 in the list of rank 0: it is there twice"),
        ("0F0 0F1 0B0 0W1", "0W1 in the list of rank 0: its input half does not come before it"),
        ("0F0 0B0 0B1 0F1", "0B1 in the list of rank 0: its forward pass does not come before it"),
        ("0F0 0F1 1B0 0B1", "1B0 in the list of rank 0: another rank has this stage"),
        ("0F0 0F1 0B0 0B2", "0B2 in the list of rank 0: there is no such stage"),
        ("0F0 2F1 0B0 0B1", "2F1 in the list of rank 0: there is no such stage"),
        ("0F0 0SEND_F0 0F1 0B0 0B1", "0SEND_F0 in the list of rank 0: messages follow"),
    ] {
        assert!(problem([list, good]).contains(words), "{list}: {}", problem([list, good]));
    }
    let shape = Shape { placement: Placement::line(3), micro_batches: 1 };
    let error = Plan::of_lists(shape, vec![Vec::new(); 2]).unwrap_err().to_string();
    assert_eq!(error, "2 lists for 3 ranks");
}

#[test]
fn messages_are_received_in_the_order_in_which_they_are_sent() {
    let error = problem(["0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0"]);
    assert!(error.starts_with("rank 0 sends 0SEND_F0 where rank 1 awaits 1RECV_F1"), "{error}");
    plan(["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"]).unwrap();
}

#[test]
fn ranks_that_wait_for_each_other_are_named() {
    let error = problem(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]);
    let cycle = "the ranks wait for each other: rank 0 cannot do 0B0 before 1I0 of rank 1, rank 1 cannot do 1F1 before 0F1 of \
                 rank 0";
    assert_eq!(error, cycle);
    assert!(
        matches!(plan(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]), Err(PlanError::Deadlock(cycle)) if cycle.len() == 2)
    );
}

#[test]
fn steps_that_a_schedule_does_not_know_are_refused_with_what_it_knows() {
    let refused = |name: &str, ranks, micro_batches| {
        let costs = |stages: &_| Costs::even(stages, 1.0, 1.0, 1.0);
        Plan::new(named(name).unwrap(), ranks, micro_batches, costs).unwrap_err().to_string()
    };
    assert!(refused("dualpipev", 4, 7).contains("7 are too few, pass 8"));
    assert!(refused("interleaved_zb", 4, 13).contains("pass 12 or 15 micro-batches"));
    assert!(refused("gpipe", 0, 1).contains("at least one of each"));
    assert!(refused("gpipe", 1, 0).contains("at least one of each"));
    assert!(named("gpipes").is_none());
}
