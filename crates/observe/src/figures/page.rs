//! Makes `docs/metrics.md`, which is the table of figures as a page.

use crate::figures::table::TABLE;

/// The page.
pub fn page() -> String {
    let mut page = HEAD.to_owned();
    for figure in TABLE {
        let unit =
            if figure.unit.is_empty() { String::new() } else { format!(" ({})", figure.unit) };
        let views: Vec<String> = figure
            .views()
            .into_iter()
            .map(|view| match (view, figure.curve) {
                ("TensorBoard", Some(tag)) => format!("TensorBoard as `{tag}`"),
                _ => view.to_owned(),
            })
            .collect();
        page += &format!(
            "| `{}`{unit} | {} | {} | {} |\n",
            figure.name,
            figure.definition,
            figure.ranks.words(),
            views.join(", ")
        );
    }
    page
}

const HEAD: &str = "\
# Figures

Every figure that a run reports, by the name that it has in all files. This page is made from the table in
`crates/observe/src/figures/table.rs`; a test compares the two.

- Times are of *measured* steps, those after `--warmup-steps`, unless the definition says otherwise. They are means
  over ranks and steps, so that parts add up to the step. Only where the definition says so, a time is a median or a
  percentile: runs are compared by the median step, which a few slow steps do not change.
- `metrics.jsonl` has the figure of one step, evaluation or save, as rank 0 saw it; `summary.json` that of the run.
- *Ranks* says how the values of the ranks become one figure of the run.
- MB are 1e6 bytes. What a flag counts in 2^20 bytes is called MiB.
- *Exposed* means that the main thread is blocked on communication, whatever the reason; *hidden* means that
  communication runs while the main thread computes. Figures from traces know kernels instead of the main thread. There
  communication is hidden while a compute kernel runs, and exposed while none does.
- A run keeps up to 65,536 measured steps one by one, so medians and percentiles are exact up to there. Of a longer
  run a random part of the steps is kept, between half and all of that number, the same on all ranks; a 99th
  percentile then lies, with 95 % confidence, between the 98.9th and the 99.1st. Means are always over all measured
  steps.

| figure | definition | ranks | shown in |
|---|---|---|---|
";

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// If this variable is set, the test writes the page instead of comparing it.
    const WRITE: &str = "PACELINE_WRITE_DOCS";

    #[test]
    fn the_page_is_that_of_the_table() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
        if std::env::var_os(WRITE).is_some() {
            std::fs::write(&path, page()).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == page(),
            "docs/metrics.md is not what the table of figures says; write it again with\n    {WRITE}=1 cargo \
             test -p paceline-observe --lib the_page_is_that_of_the_table"
        );
    }
}
