//! Numbers, words and tables as all commands print them.

/// Milliseconds.
pub(crate) fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// So many of something, in words.
pub(crate) fn plural(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Where a rank computes.
pub(crate) fn placement_line(rank: usize, local_rank: usize) -> String {
    let devices = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or("<not set>".into());
    format!("[Rank {rank}] CUDA_VISIBLE_DEVICES={devices}, LOCAL_RANK={local_rank}, device=cpu")
}

/// Lines of as many cells each, set to the right in columns.
pub(crate) fn plain_lines(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |at: usize| rows.iter().filter_map(|row| Some(row.get(at)?.len())).max();
    let widths: Vec<usize> = (0..columns).map(|at| width(at).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
        cells.collect::<Vec<_>>().join("  ")
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A number with its thousands separated.
pub(crate) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The number without what lies below its second decimal, such as the noise of a mean of whole numbers.
pub(crate) fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// A table whose first `num_left` columns are words, set to the left; the others are numbers.
pub(crate) fn plain_table<const N: usize>(
    names: [&str; N],
    num_left: usize,
    lines: &[[String; N]],
) -> String {
    let widths: [usize; N] = std::array::from_fn(|at| {
        let cells = lines.iter().map(|line| line[at].chars().count());
        cells.chain([names[at].len()]).max().unwrap_or(0)
    });
    let set = |cells: [&str; N]| {
        let padded: [String; N] = std::array::from_fn(|at| match at < num_left {
            true => format!("{:<1$}", cells[at], widths[at]),
            false => format!("{:>1$}", cells[at], widths[at]),
        });
        padded.join("  ").trim_end().to_owned()
    };
    let rule: [String; N] = widths.map(|width| "-".repeat(width));
    let head = [set(names), set(rule.each_ref().map(String::as_str))];
    let body = lines.iter().map(|line| set(line.each_ref().map(String::as_str)));
    head.into_iter().chain(body).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_separated() {
        let all = [0, 7, 999, 1000, 27_400, 1_234_567].map(thousands);
        assert_eq!(all, ["0", "7", "999", "1,000", "27,400", "1,234,567"]);
    }
}
