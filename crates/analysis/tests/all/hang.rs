//! Files of PyTorch's flight recorder, as JSON and as pickles: who holds up the others, and what is refused.

use std::fs;
use std::path::Path;

use paceline_analysis::hang::{Cause, Hang, read};
use serde_json::{Value, json};

/// A call of the default group: its operation, the size of its input, and its state.
type Call<'a> = (&'a str, u32, &'a str);

/// The file of a rank of three.
fn dump(calls: &[Call]) -> Value {
    let entry = |(at, (name, size, state)): (usize, &Call)| {
        json!({
            "frames": [
                { "name": "all_reduce", "filename": "/lib/torch/distributed/distributed_c10d.py", "line": 1 },
                { "name": "step", "filename": "train.py", "line": 40 + at },
            ],
            "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": at + 1, "p2p_seq_id": 0,
            "profiling_name": format!("nccl:{name}"), "time_created_ns": 1_796_000_000_000_000_000_u64 + at as u64,
            "input_sizes": [[size]], "input_dtypes": ["Float"], "state": state, "retired": false, "is_p2p": false,
            "time_discovered_started_ns": null, "duration_ms": 0.25,
        })
    };
    json!({
        "version": "2.10",
        "pg_config": { "0": { "name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]" } },
        "pg_status": { "0": { "last_enqueued_collective": -1, "last_started_collective": -1, "last_completed_collective": -1 } },
        "entries": calls.iter().enumerate().map(entry).collect::<Vec<_>>(),
    })
}

/// A pickle of protocol 2, with repeated texts stored once as PyTorch does.
fn pickle(value: &Value, texts: &mut Vec<String>, out: &mut Vec<u8>) {
    match value {
        Value::Null => out.push(b'N'),
        Value::Bool(of) => out.push(if *of { 0x88 } else { 0x89 }),
        Value::Number(of) => match of.as_i64() {
            Some(int @ 0..=255) => out.extend([b'K', int as u8]),
            Some(int) => {
                out.extend([0x8a, 8]);
                out.extend(int.to_le_bytes());
            }
            None => {
                out.push(b'G');
                out.extend(of.as_f64().unwrap().to_be_bytes());
            }
        },
        Value::String(text) => {
            if let Some(at) = texts.iter().position(|of| of == text) {
                return out.extend([b'h', at as u8]);
            }
            out.push(b'X');
            out.extend((text.len() as u32).to_le_bytes());
            out.extend(text.bytes());
            out.extend([b'q', texts.len() as u8]);
            texts.push(text.clone());
        }
        Value::Array(list) => {
            out.extend(b"](");
            list.iter().for_each(|of| pickle(of, texts, out));
            out.push(b'e');
        }
        Value::Object(map) => {
            out.extend(b"}(");
            for (key, of) in map {
                pickle(&Value::String(key.clone()), texts, out);
                pickle(of, texts, out);
            }
            out.push(b'u');
        }
    }
}

fn pickled(value: &Value) -> Vec<u8> {
    let mut out = vec![0x80, 2];
    pickle(value, &mut Vec::new(), &mut out);
    out.push(b'.');
    out
}

/// The answer for ranks that made these calls, written as JSON and as pickles.
fn found(ranks: &[Option<&[Call]>]) -> Hang {
    let [json, pickles] = [false, true].map(|is_pickle| {
        let folder = tempfile::tempdir().unwrap();
        for (rank, calls) in ranks.iter().enumerate() {
            let Some(calls) = calls else { continue };
            let bytes = if is_pickle {
                pickled(&dump(calls))
            } else {
                dump(calls).to_string().into_bytes()
            };
            fs::write(folder.path().join(format!("trace_rank_{rank}")), bytes).unwrap();
        }
        read(folder.path()).unwrap()
    });
    assert_eq!(format!("{json:?}"), format!("{pickles:?}"));
    json
}

const DONE: Call = ("all_reduce", 8, "completed");
const BEGUN: Call = ("all_reduce", 9, "started");
const WAITS: Call = ("all_reduce", 9, "scheduled");

#[test]
fn each_cause_is_told_from_the_others() {
    let named = |ranks: &[Option<&[Call]>]| {
        let culprits = found(ranks).culprits;
        culprits.into_iter().map(|of| (of.rank, of.cause)).collect::<Vec<_>>()
    };
    let waits: Option<&[Call]> = Some(&[DONE, BEGUN]);
    assert_eq!(named(&[waits, Some(&[DONE]), waits]), [(1, Cause::Host)]);
    assert_eq!(named(&[waits, Some(&[DONE, WAITS]), waits]), [(1, Cause::Device)]);
    assert_eq!(named(&[waits, waits, None]), [(2, Cause::NoFile)]);
    let other: Option<&[Call]> = Some(&[DONE, ("all_reduce", 7, "started")]);
    assert_eq!(named(&[other, waits, waits]), [(0, Cause::Desynchronized)]);
    let gathers: Option<&[Call]> = Some(&[DONE, ("all_gather", 7, "started")]);
    assert_eq!(
        named(&[Some(&[DONE, ("all_gather", 9, "started")]), gathers, Some(&[DONE])]),
        [(2, Cause::Host)]
    );
    assert_eq!(named(&[waits, waits, waits]).len(), 3);
    assert!(named(&[waits, waits, waits]).iter().all(|(_, cause)| *cause == Cause::Network));
    assert!(named(&[Some(&[DONE]), Some(&[DONE]), Some(&[DONE])]).is_empty());
    let ended: Option<&[Call]> = Some(&[DONE, ("all_reduce", 9, "completed")]);
    assert_eq!(named(&[ended, waits, ended]), [(1, Cause::Device)]);
}

#[test]
fn the_line_is_that_of_the_peers() {
    let waits: Option<&[Call]> = Some(&[DONE, BEGUN]);
    let hang = found(&[waits, Some(&[DONE]), waits]);
    let [culprit] = &hang.culprits[..] else { panic!("{hang:?}") };
    assert_eq!(culprit.line.as_deref(), Some("train.py:41 in step"));
    assert_eq!(
        (culprit.call.as_str(), culprit.group.as_str()),
        ("all_reduce #2", "0 (default_pg)")
    );
    assert_eq!(culprit.peers, [0, 2].into());
    assert_eq!(hang.victims.iter().map(|of| of.rank).collect::<Vec<_>>(), [0, 2]);
}

fn refusal(folder: &Path) -> String {
    read(folder).unwrap_err().to_string()
}

#[test]
fn other_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank_0");
    assert!(refusal(folder.path()).contains("no files of PyTorch's flight recorder"));
    for (bytes, reason) in [
        (
            &b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R."[..],
            "byte 3: the pickle names code to run, which is never done",
        ),
        (b"\x80\x06N.", "protocol 6"),
        (b"\x80\x02}", "cut off"),
        (b"\x80\x02]q\0h\0a.", "it has no version"),
        (b"\x80\x02X\xff\xff\xff\xff", "cut off"),
        (b"zzz", "does not belong in a pickle of plain values"),
        (b"{\"version\": \"3.0\"}", "only 2.3 to 2.10 are known"),
        (b"{", "EOF"),
    ] {
        fs::write(&path, bytes).unwrap();
        let said = refusal(folder.path());
        assert!(
            said.contains("rank_0: no file of PyTorch's flight recorder") && said.contains(reason),
            "{said}"
        );
    }
    fs::write(folder.path().join("rank_0.json"), "{}").unwrap();
    assert!(refusal(folder.path()).contains("two files of rank 0"));
    fs::write(folder.path().join("b_0.json"), "{}").unwrap();
    assert!(refusal(folder.path()).contains("files of b_ and of rank_ may be of several jobs"));
    fs::create_dir(folder.path().join("folder.0")).unwrap();
    fs::write(folder.path().join("nccl_trace_rank_0"), pickled(&dump(&[DONE]))).unwrap();
    assert_eq!(read(folder.path()).unwrap().files, 1);
    fs::write(folder.path().join("nccl_trace_rank_0"), [&[0x80, 2][..], &[b'N'; 5 << 20]].concat())
        .unwrap();
    assert!(refusal(folder.path()).contains("more than 4194304 values"));
    // Ranks far beyond any job decide about no memory.
    let mut far = dump(&[DONE]);
    far["pg_config"]["0"]["ranks"] = json!("[0, 99999999999]");
    fs::write(folder.path().join("nccl_trace_rank_0"), pickled(&far)).unwrap();
    assert_eq!(read(folder.path()).unwrap().missing, Vec::<usize>::new());
}

#[test]
fn changed_pickles_end_in_an_answer_or_an_error() {
    let sound = pickled(&dump(&[DONE, BEGUN]));
    let folder = tempfile::tempdir().unwrap();
    let mut state = 63_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let mut errors = 0;
    for _ in 0..1000 {
        let mut bytes = sound.clone();
        for _ in 0..=random(4) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] = random(256) as u8,
                1 => bytes.truncate(at + 1),
                2 => bytes.insert(at, b"(e]}uhtqsa."[random(11)]),
                _ => drop(bytes.remove(at)),
            }
        }
        fs::write(folder.path().join("rank_0"), bytes).unwrap();
        errors += usize::from(read(folder.path()).is_err());
    }
    assert!((500..1000).contains(&errors), "{errors} of 1,000 were refused");
}

/// The answer for these files.
fn answer(files: &[Value]) -> Hang {
    let folder = tempfile::tempdir().unwrap();
    for (rank, file) in files.iter().enumerate() {
        fs::write(folder.path().join(format!("trace_rank_{rank}")), pickled(file)).unwrap();
    }
    read(folder.path()).unwrap()
}

/// A rank of a batch of sends and receives with another one: PyTorch says only at its end how far the batch came.
fn batch(calls: &[&str], state: &str) -> Value {
    let mut file = dump(&[&[DONE][..], &vec![("", 8, "scheduled"); calls.len() + 1]].concat());
    let entries = file["entries"].as_array_mut().unwrap();
    for (entry, name) in entries[1..].iter_mut().zip(calls.iter().chain(&["coalesced"])) {
        entry["profiling_name"] = json!(format!("nccl:{name}"));
        (entry["is_p2p"], entry["p2p_seq_id"], entry["collective_seq_id"]) =
            (json!(true), json!(1), json!(1));
        if *name == "coalesced" {
            (entry["state"], entry["input_sizes"]) = (json!(state), json!([]));
        }
    }
    file
}

#[test]
fn a_batch_came_as_far_as_its_end() {
    let there = ["send 0->1", "recv 0<-1"];
    let back = ["send 1->0", "recv 1<-0"];
    let last = dump(&[DONE]);
    let done = answer(&[batch(&there, "completed"), batch(&back, "completed"), last.clone()]);
    assert!(done.culprits.is_empty() && done.victims.is_empty(), "{done:?}");
    let hang = answer(&[batch(&there, "started"), dump(&[DONE]), last]);
    let [culprit] = &hang.culprits[..] else { panic!("{hang:?}") };
    assert_eq!((culprit.rank, culprit.cause), (1, Cause::Host));
}

#[test]
fn groups_of_one_name_are_told_by_their_members() {
    let file = |ranks: &str, state: &str| {
        let mut file = dump(&[DONE, ("all_reduce", 9, state)]);
        let config = json!({"0": file["pg_config"]["0"], "tp": {"name": "tp", "desc": "tp", "ranks": ranks}});
        file["pg_config"] = config;
        for entry in file["entries"].as_array_mut().unwrap() {
            entry["process_group"] = json!(["tp", "tp"]);
        }
        file
    };
    let [a, b] = ["[0, 1]", "[2, 3]"];
    let mut late = file(b, "started");
    late["entries"].as_array_mut().unwrap().pop();
    let hang = answer(&[file(a, "completed"), file(a, "completed"), file(b, "started"), late]);
    let [culprit] = &hang.culprits[..] else { panic!("{hang:?}") };
    assert_eq!((culprit.rank, culprit.cause), (3, Cause::Host));
    assert_eq!(culprit.peers, [2].into());
}
