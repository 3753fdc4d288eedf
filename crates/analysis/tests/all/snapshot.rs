//! Snapshots of a card's memory: states add up, the peak is the highest moment, and files that are no snapshots are refused.

use std::fs;

use paceline_analysis::report::Report;
use paceline_analysis::snapshot::report;
use serde_json::{Value, json};

fn frames(file: &str, line: u32) -> Value {
    json!([{"filename": "/x/torch/nn/functional.py", "line": 9, "name": "linear"}, {"filename": file, "line": line, "name": "step"}])
}

/// A card with a segment of 4 MiB: parameters from before the recording, an activation that is gone at the end, and a block that stays.
fn snapshot() -> Value {
    const MIB: u64 = 1 << 20;
    let event = |action: &str, addr: u64, size: u64, frames: Value| json!({"action": action, "addr": addr, "size": size, "frames": frames});
    let block = |address: u64, size: u64, requested: u64, state: &str, frames: Value| json!({"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames});
    json!({
        "segments": [{"device": 0, "address": 0, "total_size": 4 * MIB, "blocks": [
            block(0, MIB, MIB - 100, "active_allocated", json!([])),
            block(MIB, MIB, 0, "inactive", json!([])),
            block(2 * MIB, MIB, MIB, "active_awaiting_free", json!([])),
            block(3 * MIB, MIB, MIB, "active_allocated", frames("model.py", 8)),
        ]}],
        "device_traces": [[
            event("alloc", MIB, MIB / 2, frames("model.py", 7)),
            event("alloc", 3 * MIB, MIB, frames("model.py", 8)),
            event("free_requested", MIB, MIB / 2, json!([])),
            event("free_completed", MIB, MIB / 2, json!([])),
            event("oom", 0, 40 * MIB, frames("model.py", 9)),
        ]],
    })
}

fn written(bytes: &[u8]) -> Result<Report, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("snapshot.pickle");
    fs::write(&path, bytes).unwrap();
    report(&path).map_err(|error| error.to_string())
}

#[test]
fn states_add_up_and_the_peak_is_the_highest_moment() {
    let report = written(snapshot().to_string().as_bytes()).unwrap();
    let csv = |id: &str| report.table(id).unwrap().csv();
    let mib = |csv: &str| -> f64 {
        let rows = csv.lines().skip(1).map(|row| row.split(',').collect::<Vec<_>>());
        rows.map(|row| row.iter().find_map(|cell| cell.parse::<f64>().ok()).unwrap()).sum()
    };
    assert!((mib(&csv("memory-by-state")) - 4.0).abs() < 1e-9, "{}", csv("memory-by-state"));
    let peak = csv("memory-at-peak");
    assert!((mib(&peak) - 2.5).abs() < 1e-3, "{peak}");
    for row in ["model.py:7 in step,forward,0.5,1", "model.py:8 in step,forward,1,1"] {
        assert!(peak.contains(row), "{peak}");
    }
    assert!(
        report.notes[0]
            .text
            .contains("40.00 MiB failed with 0.00 MiB free on the card, at model.py:9")
    );
}

#[test]
fn other_files_are_refused() {
    for (bytes, reason) in [
        (&b"{}"[..], "it has no segments of memory"),
        (b"{\"segments\": [], \"device_traces\": []}", "it has no segments of memory"),
        (b"\x80\x04cos\nsystem\n.", "never done"),
        (b"\x80\x04\x95\0\0\0\0\0\0\0\0}\x94\x8c\x08segm", "cut off"),
    ] {
        let said = written(bytes).unwrap_err();
        assert!(
            said.contains("no snapshot of PyTorch's memory") && said.contains(reason),
            "{said}"
        );
    }
    // Numbers that no card has end in figures, or in an error.
    let mut huge = snapshot();
    for (key, of) in [("total_size", u64::MAX), ("device", u64::MAX)] {
        huge["segments"][0][key] = json!(of);
    }
    huge["device_traces"][0][1]["size"] = json!(i64::MAX);
    assert!(written(huge.to_string().as_bytes()).is_ok());
}
