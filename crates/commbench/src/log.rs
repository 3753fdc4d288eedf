//! Reads the table that nccl-tests prints, from its version 2.0 on, with the columns that the line above the rows names.
//!
//! Lines that begin with neither `#` nor a size are other output, such as NCCL's own messages.

use super::load::{Problem, usable};
use super::series::Measured;

/// Whether this is a log of nccl-tests.
pub(super) fn is_log(text: &str) -> bool {
    text.lines().any(|line| line.trim_start().starts_with("# nThread "))
}

/// The operation that a program of nccl-tests measures, such as `./build/all_reduce_perf`.
pub(super) fn operation(program: &str) -> Option<String> {
    let (name, _) = program.rsplit('/').next()?.split_once("_perf")?;
    Some(match name {
        "alltoall" => "all_to_all".to_owned(),
        "sendrecv" => "send_recv".to_owned(),
        name => name.to_owned(),
    })
}

/// The time of a row, in place if it is there, given the columns and the words after the element type.
fn time_us(names: &[&str], words: &[&str]) -> Result<f64, String> {
    let times: Vec<usize> = (0..names.len()).filter(|&at| names[at] == "time").collect();
    let [first, second] = times[..] else {
        return Err("the header has no column \"time\" for each place".to_owned());
    };
    let root = usize::from(names[..first].contains(&"root"));
    // The time of day at the end of a row has two words.
    let clock = usize::from(names.last() == Some(&"timestamp"));
    let (out_of_place, both) = (second - first, names.len() - clock - first);
    // Old versions leave the reduction or the root empty where an operation has none.
    let redop = usize::from(words.first().is_some_and(|word| word.parse::<f64>().is_err()));
    let values = words.get(redop..words.len().saturating_sub(2 * clock)).unwrap_or_default();
    let time = match values.len() {
        count if count == root + both => root + out_of_place,
        count if count == both => out_of_place,
        count if count == root + out_of_place => root,
        count if count == out_of_place => 0,
        _ => return Err("the row has not as many columns as the header".to_owned()),
    };
    let time = values[time].parse().ok().and_then(usable);
    time.ok_or_else(|| format!("no usable time in {:?}", values.join(" ")))
}

/// The times of a log. It may have several runs, one after the other.
pub(super) fn parse(text: &str) -> Result<Vec<Measured>, Problem> {
    // Ranks may be divided into groups. Those of the first one are counted.
    let (mut all, mut op, mut columns, mut group, mut nproc) = (Vec::new(), None, None, None, 0);
    for (at, line) in text.lines().enumerate() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let refuse = |problem: &str| (at + 1, problem.to_owned());
        match words[..] {
            ["#", "nThread", ..] => (group, nproc) = (None, 0),
            ["#", "Collective", "test", "starting:", program, ..] => op = operation(program),
            ["#", "Rank", .., last] if last.ends_with("...") => {
                return Err(refuse("the list of ranks is cut off"));
            }
            ["#", "Rank", _, name, own, ..] => {
                nproc += usize::from(name != "Group" || *group.get_or_insert(own) == own);
            }
            ["#", "size", "count", "type", ref names @ ..] => columns = Some(names.to_vec()),
            ["#", "Out", "of", "bounds", ..] => columns = None,
            [size, ref rest @ ..] if size.bytes().all(|byte| byte.is_ascii_digit()) => {
                let Some(columns) = &columns else { continue };
                if nproc == 0 {
                    return Err(refuse("no line \"#  Rank 0 ...\" above the table"));
                }
                let time_us = time_us(columns, rest.get(2..).unwrap_or_default());
                all.push(Measured {
                    name: "nccl-tests".to_owned(),
                    algorithm: None,
                    nproc,
                    op: op.clone(),
                    bytes: size.parse().map_err(|_| refuse("no usable size"))?,
                    time_us: time_us.map_err(|problem| refuse(&problem))?,
                });
            }
            _ => {}
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: &str = "
        # nccl-tests version 2.19.6 nccl-headers=22807 nccl-library=22807
        # Collective test starting: all_reduce_perf
        # nThread 1 nGpus 2 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0
        #
        # Using devices
        #  Rank  0 Group  0 Pid   4242 on     node01 device  0 [0000:18:00] NVIDIA H100 80GB HBM3
        #  Rank  1 Group  0 Pid   4242 on     node01 device  1 [0000:2a:00] NVIDIA H100 80GB HBM3
        #
        #                                                              out-of-place                       in-place          
        #       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong 
        #        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         
                   8             2     float     sum      -1    12.34    0.00    0.00       0    11.50    0.00    0.00       0
        node01:4242:4242 [0] NCCL INFO something
                1024           256     float     sum      -1   145944    0.01    0.01    N/A                                
        # Out of bounds values : 0 OK
        # Avg bus bandwidth    : 0.005 
        #
        # Collective test concluded: all_reduce_perf";

    fn times(text: &str) -> Vec<(usize, Option<String>, u64, f64)> {
        let all = parse(text).unwrap().into_iter();
        all.map(|of| (of.nproc, of.op, of.bytes, of.time_us)).collect()
    }

    #[test]
    fn a_log_gives_the_times_in_place_where_they_are() {
        assert!(is_log(NEW) && !is_log("# 2 ranks over shm"));
        let op = Some("all_reduce".to_owned());
        assert_eq!(times(NEW), [(2, op.clone(), 8, 11.5), (2, op, 1024, 145_944.0)]);
        // Two runs in one file.
        let second =
            NEW.replace("all_reduce_perf", "alltoall_perf").replace(" Group  0", " Group  1");
        assert_eq!(times(&format!("{NEW}\n{second}")).len(), 4);
        assert_eq!(times(&format!("{NEW}{second}"))[3].1.as_deref(), Some("all_to_all"));
        let split = NEW.replace("Rank  1 Group  0", "Rank  1 Group  1");
        assert_eq!(times(&split)[0].0, 1, "the ranks of a group");
    }

    #[test]
    fn columns_of_other_versions_and_flags_are_found_by_their_names() {
        let header = "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong ";
        let table = |names: &str, row: &str| {
            let (head, rest) = NEW.split_once(header).unwrap();
            let units = rest.lines().nth(1).unwrap();
            times(&format!("{head}{names}\n{units}\n{row}\n"))[0].3
        };
        // Version 2.0: no root, and "error".
        let old = "#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error";
        let row = "        1024           256   float     sum    10.61    0.10    0.10  1e-07    10.00    0.10    0.10  1e-07";
        assert_eq!(table(old, row), 10.0);
        // An all-gather of version 2.10: neither a reduction nor a root.
        let gather = "        1024           256     float                     10.61    0.10    0.10      0    9.00    0.10    0.10      0";
        assert_eq!(table(header, gather), 9.0);
        // With -I 1 -S 1.
        let iterations = "  #wrong    i_min    i_max    i_p99    i_cv%";
        let each = header.replace("  #wrong", iterations) + "          timestamp";
        let row = "        1024           256     float     sum      -1     3.00    0.34    0.34       0     2.00     4.00     4.00    23.57     2.50    0.34    0.34       0     2.00     4.00     4.00    23.57  2026-07-09 16:03:21";
        assert_eq!(table(&each, row), 2.5);
    }

    #[test]
    fn a_row_that_is_not_whole_is_named_with_its_line() {
        for (from, to, line, problem) in [
            ("11.50    0.00    0.00       0", "11.50    0.00", 13, "not as many columns"),
            (
                "    sum      -1    12.34    0.00    0.00       0    11.50    0.00    0.00       0",
                "",
                13,
                "not as many",
            ),
            (
                "             2     float     sum      -1    12.34    0.00    0.00       0    11.50    0.00    0.00       0",
                "",
                13,
                "not as many",
            ),
            ("11.50", "nan", 13, "no usable time in \"-1 12.34 0.00 0.00 0 nan"),
            ("11.50", "N/A", 13, "no usable time"),
            ("11.50", "inf", 13, "no usable time"),
            ("11.50", "-1", 13, "no usable time"),
            ("11.50", "0.00", 13, "no usable time"),
            ("145944", "14\u{1b}[31m", 15, "no usable time in \"-1 14\\u{1b}[31m"),
            ("        1024 ", "99999999999999999999 ", 15, "no usable size"),
            ("    time ", " cputime ", 13, "no column \"time\""),
            ("#  Rank ", "#  Cut ", 13, "no line \"#  Rank 0"),
            (
                "[0000:2a:00] NVIDIA H100 80GB HBM3",
                "[0000:2a...",
                8,
                "the list of ranks is cut off",
            ),
        ] {
            let text = NEW.replace(from, to);
            assert_ne!(text, NEW, "{from}");
            let (at, said) = parse(&text).unwrap_err();
            assert!(at == line && said.contains(problem), "{to}: {at}: {said}");
        }
    }
}
