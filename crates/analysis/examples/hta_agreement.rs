//! Compares the analysis of traces with Holistic Trace Analysis (HTA). `bench/traces.py` runs this example
//! after it has put HTA's figures, `hta.json` and `hta-rounded.json`, into the folder of the traces.
//!
//! `cargo run --release -p paceline-analysis --example hta_agreement -- FOLDER` prints one line of JSON.

#[path = "../tests/all/hta/comparison.rs"]
mod comparison;

use std::error::Error;
use std::path::PathBuf;

use comparison::Comparison;
use paceline_analysis::hta::Rules;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args_os().nth(1).ok_or("give a folder")?);
    let [exact, rounded] =
        [Rules::Hta, Rules::HtaRounded].map(|rules| Comparison::of(&folder, rules));
    let differences = [exact.differences, rounded.differences].concat();
    let compared = exact.compared + rounded.compared;
    println!("{}", serde_json::json!({"compared": compared, "differences": differences}));
    Ok(())
}
