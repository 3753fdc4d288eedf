//! The rules of Perfetto's JSON import that a trace can break. A trace goes in. Out come the errors that
//! Perfetto would count, and what it would show.
//!
//! The rules are those of its `json_trace_tokenizer.cc`, `slice_tracker.cc` and `flow_tracker.cc` (version
//! 59). Events are taken in order of time. Of events at the same time, the longest complete event comes
//! first. Complete events of a thread form a stack. Ends of arrows belong to the top of their thread's stack.
//! Times are read as floating-point numbers of microseconds, multiplied by 1000 and truncated.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::Value;

/// A process and a thread, by their numbers.
pub type Thread = (u64, u64);

/// What was imported.
#[derive(Debug, Default)]
pub struct Imported {
    /// Counts of errors that occurred, by their names in Perfetto's table `stats`.
    pub errors: BTreeMap<&'static str, usize>,
    pub num_slices: usize,
    /// Arrows from one event to the next: name, and the threads of both.
    pub flows: Vec<(String, Thread, Thread)>,
    /// Names of processes, by number.
    pub processes: BTreeMap<u64, String>,
    /// Names of threads, by process and thread.
    pub threads: BTreeMap<Thread, String>,
}

const MAX_DEPTH: usize = 512;

struct Slice {
    start_ns: i64,
    dur_ns: i64,
}

/// Imports a trace.
pub fn import(trace: &Value) -> Imported {
    let mut imported = Imported::default();
    let mut events: Vec<(i64, std::cmp::Reverse<i64>, &Value)> = Vec::new();
    for event in trace["traceEvents"].as_array().unwrap() {
        let phase = event["ph"].as_str().unwrap_or("");
        let Some(at_ns) = nanos(&event["ts"]).or((phase == "M").then_some(0)) else {
            imported.fail("json_tokenizer_failure");
            continue;
        };
        if phase.is_empty() {
            imported.fail("json_tokenizer_failure");
        }
        if at_ns < 0 {
            imported.fail("trace_sorter_negative_timestamp_dropped");
            continue;
        }
        let dur_ns = if phase == "X" { nanos(&event["dur"]).unwrap_or(0) } else { -1 };
        events.push((at_ns, std::cmp::Reverse(dur_ns), event));
    }
    // The sort is stable, so that events that compare equal stay in the order of the file.
    events.sort_by_key(|&(at_ns, dur_ns, _)| (at_ns, dur_ns));
    let mut stacks: HashMap<Thread, Vec<Slice>> = HashMap::new();
    let mut arrows: HashMap<(u64, &str, &str), Thread> = HashMap::new();
    let mut begun: HashSet<(u64, &str, &str)> = HashSet::new();
    for (at_ns, std::cmp::Reverse(dur_ns), event) in events {
        let number = |key: &str| event[key].as_u64().filter(|&n| n <= u64::from(u32::MAX));
        let (Some(pid), Some(tid)) = (number("pid"), number("tid")) else {
            imported.fail("json_parser_failure");
            continue;
        };
        // Thread 0 counts as the first thread of the process.
        let thread = (pid, if tid == 0 { pid } else { tid });
        let (name, category) = (&event["name"], event["cat"].as_str().unwrap_or(""));
        let name = name.as_str().unwrap_or("");
        match event["ph"].as_str().unwrap_or("") {
            "M" if name == "process_name" => {
                imported.processes.insert(pid, event["args"]["name"].as_str().unwrap().into());
            }
            "M" if name == "thread_name" => {
                imported.threads.insert(thread, event["args"]["name"].as_str().unwrap().into());
            }
            "X" => imported.slice(stacks.entry(thread).or_default(), at_ns, dur_ns),
            "i" | "I" if matches!(event["s"].as_str(), None | Some("t")) => {
                imported.slice(stacks.entry(thread).or_default(), at_ns, 0);
            }
            "C" if !event["args"].is_object() => imported.fail("json_parser_failure"),
            "b" | "e" | "n" if event["id"].is_null() => imported.fail("json_parser_failure"),
            phase @ ("s" | "t" | "f") => {
                let Some(id) = event["id"].as_u64() else {
                    imported.fail("flow_invalid_id");
                    continue;
                };
                if stacks.get(&thread).is_none_or(Vec::is_empty) {
                    imported.fail("flow_no_enclosing_slice");
                    continue;
                }
                let identity = (id, category, name);
                if phase == "s" {
                    if !begun.insert(identity) {
                        imported.fail("flow_duplicate_id");
                        continue;
                    }
                } else if let Some(&from) = arrows.get(&identity) {
                    imported.flows.push((name.into(), from, thread));
                } else {
                    // Perfetto does not count this as an error, but nobody would see the arrow.
                    imported.fail("flow_end_without_start");
                }
                arrows.insert(identity, thread);
            }
            _ => {}
        }
    }
    imported
}

impl Imported {
    fn fail(&mut self, what: &'static str) {
        *self.errors.entry(what).or_default() += 1;
    }

    fn slice(&mut self, stack: &mut Vec<Slice>, at_ns: i64, dur_ns: i64) {
        if dur_ns < 0 {
            return self.fail("slice_negative_duration");
        }
        let end_ns = at_ns + dur_ns;
        while let Some(top) = stack.last() {
            let top_ns = top.start_ns + top.dur_ns;
            let both_moments = top.dur_ns == 0 && dur_ns == 0;
            if !(top_ns < at_ns || (top_ns == at_ns && !both_moments)) {
                break;
            }
            stack.pop();
        }
        if stack.iter().any(|open| {
            let open_ns = open.start_ns + open.dur_ns;
            at_ns < open_ns && end_ns > open_ns
        }) {
            return self.fail("slice_spill_overlapping_complete_event");
        }
        if stack.len() >= MAX_DEPTH {
            return self.fail("slice_max_depth_exceeded");
        }
        stack.push(Slice { start_ns: at_ns, dur_ns });
        self.num_slices += 1;
    }
}

fn nanos(value: &Value) -> Option<i64> {
    match value {
        Value::Number(number) if number.is_i64() => Some(number.as_i64()? * 1000),
        Value::Number(number) => Some((number.as_f64()? * 1000.0) as i64),
        _ => None,
    }
}
