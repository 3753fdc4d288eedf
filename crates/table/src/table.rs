//! Tables of typed cells under columns with definitions, as lines for a console, CSV, Markdown and JSON. All numbers on a console are
//! formatted here.

use std::borrow::{Borrow, Cow};

use paceline_files::printable;
use serde::{Serialize, Serializer};

use crate::fitted::fitted;

/// The description of a column.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Head {
    /// Its name in files. A column without a key is for people alone.
    pub key: Cow<'static, str>,
    /// Its name for people, without the unit. A column without a label is in files alone.
    #[serde(skip)]
    pub label: Cow<'static, str>,
    /// The unit; empty for words and plain numbers.
    pub unit: Cow<'static, str>,
    /// The meaning of its values, and how they are computed.
    pub definition: Cow<'static, str>,
    /// How many decimals people see; files have all digits.
    #[serde(skip)]
    pub decimals: usize,
}

impl Head {
    /// The head of a column whose names are constants.
    pub const fn new(
        key: &'static str,
        label: &'static str,
        (unit, decimals): (&'static str, usize),
        definition: &'static str,
    ) -> Self {
        Self {
            key: Cow::Borrowed(key),
            label: Cow::Borrowed(label),
            unit: Cow::Borrowed(unit),
            definition: Cow::Borrowed(definition),
            decimals,
        }
    }

    /// The head of a column without unit and definition, with the same name everywhere.
    pub fn plain(name: impl Into<Cow<'static, str>>) -> Self {
        let name = name.into();
        Self { key: name.clone(), label: name, ..Self::default() }
    }

    /// The label with the unit.
    pub fn words(&self) -> String {
        match &*self.unit {
            "" => self.label.to_string(),
            unit => format!("{} {unit}", self.label),
        }
    }
}

/// A value in a row. A number that is not finite is `null` in JSON, as a missing one is.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Cell {
    /// Text.
    Text(String),
    /// A whole number.
    Whole(u64),
    /// A number.
    Number(f64),
    /// Whether something holds.
    Bool(bool),
    /// There is no such value.
    Missing,
}

impl Cell {
    /// The cell as people see it: a dash where there is no value.
    pub fn shown(&self, column: &Head) -> String {
        match self {
            Cell::Text(words) => words.clone(),
            Cell::Whole(number) => grouped(*number as f64, 0),
            Cell::Number(value) if value.is_finite() => grouped(*value, column.decimals),
            Cell::Bool(holds) => if *holds { "yes" } else { "no" }.to_owned(),
            Cell::Number(_) | Cell::Missing => "\u{2013}".to_owned(),
        }
    }

    /// The cell with all its digits, as files hold it; empty where there is no value.
    pub fn exact(&self) -> String {
        match self {
            Cell::Text(words) => words.clone(),
            Cell::Whole(number) => number.to_string(),
            Cell::Number(value) if value.is_finite() => value.to_string(),
            Cell::Bool(holds) => holds.to_string(),
            Cell::Number(_) | Cell::Missing => String::new(),
        }
    }

    /// Its number; `None` if it has none.
    pub fn number(&self) -> Option<f64> {
        match self {
            Cell::Whole(number) => Some(*number as f64),
            Cell::Number(value) => Some(*value),
            Cell::Text(_) | Cell::Bool(_) | Cell::Missing => None,
        }
    }

    /// Whether the cell is right-aligned like a number.
    pub fn is_number(&self) -> bool {
        !matches!(self, Cell::Text(_) | Cell::Bool(_))
    }
}

impl From<&str> for Cell {
    fn from(words: &str) -> Self {
        Cell::Text(words.to_owned())
    }
}

impl From<String> for Cell {
    fn from(words: String) -> Self {
        Cell::Text(words)
    }
}

impl From<u64> for Cell {
    fn from(number: u64) -> Self {
        Cell::Whole(number)
    }
}

impl From<usize> for Cell {
    fn from(number: usize) -> Self {
        Cell::Whole(number as u64)
    }
}

impl From<f64> for Cell {
    fn from(number: f64) -> Self {
        Cell::Number(number)
    }
}

impl From<bool> for Cell {
    fn from(holds: bool) -> Self {
        Cell::Bool(holds)
    }
}

impl<T: Into<Cell>> From<Option<T>> for Cell {
    fn from(value: Option<T>) -> Self {
        value.map_or(Cell::Missing, Into::into)
    }
}

type Get<T> = Box<dyn Fn(&T) -> Cell + Send + Sync>;

/// A column of a table with a row per `T`.
pub struct Column<T> {
    /// Its names, unit, decimals and definition.
    pub head: Head,
    get: Get<T>,
}

impl<T> Column<T> {
    /// A column whose cells `cell` computes.
    pub fn new<C: Into<Cell>>(head: Head, cell: impl Fn(&T) -> C + Send + Sync + 'static) -> Self {
        Self { head, get: Box::new(move |of| cell(of).into()) }
    }

    /// Its cell in the row of `of`.
    pub fn cell(&self, of: &T) -> Cell {
        (self.get)(of)
    }
}

/// The columns of a table with a row per `T`.
pub struct Columns<T>(pub Vec<Column<T>>);

impl<T> Columns<T> {
    /// No columns yet.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a column. `cell` computes its cell from a row's `T`; see [`Head`] for the other arguments.
    pub fn add<C: Into<Cell>>(
        mut self,
        key: impl Into<Cow<'static, str>>,
        label: impl Into<Cow<'static, str>>,
        unit: (&'static str, usize),
        definition: &'static str,
        cell: impl Fn(&T) -> C + Send + Sync + 'static,
    ) -> Self {
        let (key, label, (unit, decimals)) = (key.into(), label.into(), unit);
        let (unit, definition) = (unit.into(), definition.into());
        self.0.push(Column::new(Head { key, label, unit, definition, decimals }, cell));
        self
    }

    /// The table of these rows.
    pub fn table<R: Borrow<T>>(&self, rows: impl IntoIterator<Item = R>) -> Table {
        let cells = |row: R| self.0.iter().map(|column| column.cell(row.borrow())).collect();
        let columns = self.0.iter().map(|column| column.head.clone()).collect();
        Table { columns, rows: rows.into_iter().map(cells).collect(), mean: None }
    }
}

/// Markdown transposes a table with more than `MANY_COLUMNS` columns and at most `FEW_ROWS` rows.
const MANY_COLUMNS: usize = 10;
const FEW_ROWS: usize = 8;

/// Rows of cells under columns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// The columns.
    pub columns: Vec<Head>,
    /// The rows, each with a cell per column.
    pub rows: Vec<Vec<Cell>>,
    /// The mean over the rows, where it is meaningful. CSV and JSON leave it out.
    pub mean: Option<Vec<Cell>>,
}

impl Table {
    /// Whether column `at` holds only numbers, which are right-aligned.
    pub fn is_number(&self, at: usize) -> bool {
        self.rows.iter().all(|row| row[at].is_number())
    }

    /// The table with the columns for which `is_in` holds.
    pub fn with_columns(&self, is_in: impl Fn(&Head) -> bool) -> Self {
        let is_in: Vec<bool> = self.columns.iter().map(is_in).collect();
        let part = |row: &Vec<Cell>| {
            let cells = row.iter().zip(&is_in).filter(|(_, is_in)| **is_in);
            cells.map(|(cell, _)| cell.clone()).collect()
        };
        let columns = self.columns.iter().zip(&is_in).filter(|(_, is_in)| **is_in);
        Self {
            columns: columns.map(|(column, _)| column.clone()).collect(),
            rows: self.rows.iter().map(part).collect(),
            mean: self.mean.as_ref().map(part),
        }
    }

    /// As CSV: the keys, then the rows with all digits. Lines end with a line feed alone.
    pub fn csv(&self) -> String {
        let shown = self.with_columns(|column| !column.key.is_empty());
        let head = shown.columns.iter().map(|column| csv_text(&column.key)).collect();
        // Text may come from others, and a spreadsheet that opens the file must not run it.
        let cell = |cell: &Cell| match cell {
            Cell::Text(words) => csv_text(words),
            _ => cell.exact(),
        };
        let rows = shown.rows.iter().map(|row| row.iter().map(cell).collect());
        csv_lines(std::iter::once(head).chain(rows))
    }

    /// The columns for people, with the words of their heads and of the mean and all rows.
    fn shown(&self) -> (Self, Vec<String>, Vec<Vec<String>>) {
        let table = self.with_columns(|column| !column.label.is_empty());
        let head = table.columns.iter().map(Head::words).collect();
        let line = |row: &Vec<Cell>| {
            row.iter().zip(&table.columns).map(|(cell, column)| cell.shown(column)).collect()
        };
        let lines = table.mean.iter().chain(&table.rows).map(line).collect();
        (table, head, lines)
    }

    /// As a Markdown table. A table with many columns and few rows is transposed, for issues.
    pub fn markdown(&self) -> String {
        let (table, head, rows) = self.shown();
        let rule = |is_number| if is_number { "---:" } else { "---" }.to_owned();
        let columns = 0..head.len();
        let is_wide = head.len() > MANY_COLUMNS && table.rows.len() <= FEW_ROWS;
        let mut lines = [vec![head], rows].concat();
        if is_wide {
            let line = |at: usize| lines.iter().map(|line| line[at].clone()).collect();
            let transposed: Vec<Vec<String>> = columns.map(line).collect();
            let rule = (0..lines.len()).map(|at| rule(at > 0)).collect();
            lines = transposed;
            lines.insert(1, rule);
        } else {
            lines.insert(1, columns.map(|at| rule(table.is_number(at))).collect());
        }
        let plain = |line: &Vec<String>| line.iter().map(|cell| plain_markdown(cell)).collect();
        let line = |line: &Vec<String>| -> String {
            let cells: Vec<String> = plain(line);
            format!("| {} |\n", cells.join(" | "))
        };
        lines.iter().map(line).collect()
    }

    /// As lines of at most `width` characters, in the form that [fits](crate::fitted). Numbers are right-aligned.
    pub fn fitted(&self, width: Option<usize>) -> String {
        let (table, head, lines) = self.shown();
        fitted(&head, &lines, |at| !table.is_number(at), width)
    }

    /// A table whose last row is the mean.
    pub fn with_mean(&self) -> Self {
        let rows = self.rows.iter().chain(&self.mean).cloned().collect();
        Self { columns: self.columns.clone(), rows, mean: None }
    }

    /// A table of the first `count` rows, and the number of rows that it leaves out.
    pub fn head(&self, count: usize) -> (Self, usize) {
        let rows: Vec<_> = self.rows.iter().take(count).cloned().collect();
        let left_out = self.rows.len() - rows.len();
        (Self { columns: self.columns.clone(), rows, mean: self.mean.clone() }, left_out)
    }
}

/// As JSON: the columns' heads, and each row as an object by their keys.
impl Serialize for Table {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Json<'a> {
            columns: &'a [Head],
            rows: Vec<Row<'a>>,
        }
        struct Row<'a>(&'a [Head], &'a [Cell]);
        impl Serialize for Row<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_map(self.0.iter().map(|column| &column.key).zip(self.1))
            }
        }
        let Self { columns, rows, .. } = &self.with_columns(|column| !column.key.is_empty());
        let rows = rows.iter().map(|row| Row(columns, row)).collect();
        Json { columns, rows }.serialize(serializer)
    }
}

/// Text that cannot start HTML, another cell or another line of Markdown.
pub fn plain_markdown(text: &str) -> String {
    let line = text.replace(['\n', '\r'], " ");
    printable(&line).replace('&', "&amp;").replace('<', "&lt;").replace('|', "\\|")
}

/// Rows of CSV, all of the same length. Lines end with a line feed alone. Text of others must be [`csv_text`].
pub fn csv_lines(rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut writer = csv::Writer::from_writer(Vec::new());
    rows.into_iter()
        .try_for_each(|row| writer.write_record(row))
        .expect("rows are of the same length, and memory takes them");
    String::from_utf8(writer.into_inner().expect("memory takes them")).expect("all of it is text")
}

/// [`printable`] text for a cell of CSV. An apostrophe precedes text, other than numbers, that a spreadsheet would take for a formula.
pub fn csv_text(text: &str) -> String {
    const FORMULA: [char; 8] = ['=', '+', '-', '@', '\u{ff1d}', '\u{ff0b}', '\u{ff0d}', '\u{ff20}'];
    let shown = printable(text);
    if shown.starts_with(FORMULA) && shown.parse::<f64>().is_err() {
        return format!("'{shown}");
    }
    shown.into_owned()
}

/// A count with its noun: `one` if the count is 1, `several` for any other count.
pub fn counted(count: u64, one: &str, several: &str) -> String {
    format!("{} {}", grouped(count as f64, 0), if count == 1 { one } else { several })
}

/// A number with `decimals` decimals and commas between thousands.
pub fn grouped(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    let (sign, digits) = text.strip_prefix('-').map_or(("", text.as_str()), |rest| ("-", rest));
    let (whole, fraction) = digits.split_at(digits.find('.').unwrap_or(digits.len()));
    // A negative number may round to zero, which is written without a sign.
    let is_zero = digits.chars().all(|c| matches!(c, '0' | '.'));
    let groups = whole.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy);
    let whole = groups.collect::<Vec<_>>().join(",");
    format!("{}{whole}{fraction}", if is_zero { "" } else { sign })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        Table {
            columns: vec![
                Head::new("name", "name", ("", 0), "who"),
                Head::new("took_us", "took", ("us", 1), "how long"),
                Head::new("calls", "calls", ("", 0), "how often"),
            ],
            rows: vec![
                vec!["a,\"b\"".into(), Cell::Number(1234.5678), Cell::Whole(1000)],
                vec!["c|d".into(), Cell::Number(f64::NAN), Cell::Missing],
            ],
            mean: None,
        }
    }

    #[test]
    fn files_have_all_digits() {
        assert_eq!(table().csv(), "name,took_us,calls\n\"a,\"\"b\"\"\",1234.5678,1000\nc|d,,\n");
        let json: serde_json::Value = serde_json::to_value(table()).unwrap();
        assert_eq!(json["columns"][1]["unit"], "us");
        assert_eq!(json["columns"][1]["definition"], "how long");
        assert_eq!(json["rows"][0]["took_us"], 1234.5678);
        assert_eq!(json["rows"][0]["calls"], 1000);
        assert!(json["rows"][1]["took_us"].is_null() && json["rows"][1]["calls"].is_null());
    }

    #[test]
    fn text_of_others_runs_in_no_spreadsheet() {
        let all = [
            ("=1+1", "'=1+1"),
            ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
            ("-2+3", "'-2+3"),
            ("@SUM(A1)", "'@SUM(A1)"),
            ("\t=1", "\\t=1"),
            ("\r=1", "\\r=1"),
            ("\u{ff1d}1", "'\u{ff1d}1"),
            ("a\u{1b}[2J\u{200f}", "a\\u{1b}[2J\\u{200f}"),
            ("-0.5", "-0.5"),
            ("+1e3", "+1e3"),
            ("a=1", "a=1"),
            ("\u{65e5}", "\u{65e5}"),
        ];
        for (text, expected) in all {
            let head = Head::plain(text);
            let row = vec![text.into()];
            let csv = Table { columns: vec![head], rows: vec![row], mean: None }.csv();
            assert_eq!(csv, format!("{expected}\n").repeat(2));
        }
        let row = vec![Cell::Number(-0.5)];
        let csv = Table { columns: vec![Head::plain("x")], rows: vec![row], mean: None }.csv();
        assert_eq!(csv, "x\n-0.5\n");
    }

    #[test]
    fn keys_keep_their_order() {
        let text = serde_json::to_string(&table()).unwrap();
        let at = |key: &str| text.rfind(key).unwrap();
        assert!(at("\"name\":") < at("\"took_us\":") && at("\"took_us\":") < at("\"calls\":"));
    }

    #[test]
    fn people_see_few_digits() {
        assert_eq!(
            table().markdown(),
            "| name | took us | calls |\n| --- | ---: | ---: |\n\
             | a,\"b\" | 1,234.6 | 1,000 |\n| c\\|d | \u{2013} | \u{2013} |\n"
        );
        assert_eq!(
            table().fitted(None),
            "name   took us  calls\n-----  -------  -----\n\
             a,\"b\"  1,234.6  1,000\nc|d          \u{2013}      \u{2013}"
        );
    }

    #[test]
    fn a_column_may_be_for_files_or_for_people_alone() {
        let columns = Columns::new()
            .add("", "ranks", ("", 0), "", |row: &(u64, bool)| format!("*{}", row.0))
            .add("ranks", "", ("", 0), "how many", |row| row.0)
            .add("fits", "", ("", 0), "", |row| row.1)
            .add("half", "half", ("MB", 1), "", |row| row.0 as f64 / 2.0);
        let table = columns.table([(2, true), (3, false)]);
        assert_eq!(table.csv(), "ranks,fits,half\n2,true,1\n3,false,1.5\n");
        assert_eq!(
            table.fitted(None),
            "ranks  half MB\n-----  -------\n*2         1.0\n*3         1.5"
        );
        assert!(table.markdown().starts_with("| ranks | half MB |\n"));
        let json: serde_json::Value = serde_json::to_value(&table).unwrap();
        assert_eq!(json["rows"][1], serde_json::json!({"ranks": 3, "fits": false, "half": 1.5}));
        assert_eq!(json["columns"].as_array().map(Vec::len), Some(3));
        assert_eq!(Cell::Bool(true).shown(&table.columns[2]), "yes");
    }

    #[test]
    fn wide_tables_lie_on_their_side() {
        let columns = (0..12).map(|at| Head::plain(format!("c{at}")));
        let row = |of: u64| (0..12).map(|at| Cell::Whole(of + at)).collect();
        let table = Table { columns: columns.collect(), rows: vec![row(0), row(100)], mean: None };
        let text = table.markdown();
        assert!(
            text.starts_with("| c0 | 0 | 100 |\n| --- | ---: | ---: |\n| c1 | 1 | 101 |\n"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 13);
    }

    #[test]
    fn names_command_neither_terminals_nor_pages() {
        let columns = vec![Head::new("name", "name", ("", 0), "")];
        let rows = vec![vec!["\u{1b}[31mred\u{7}\n<script>|&amp;\u{9b}".into()]];
        let table = Table { columns, rows, mean: None };
        assert_eq!(
            table.fitted(None).lines().last(),
            Some("\\u{1b}[31mred\\u{7}\\n<script>|&amp;\\u{9b}")
        );
        assert_eq!(
            table.markdown().lines().last(),
            Some("| \\u{1b}[31mred\\u{7} &lt;script>\\|&amp;amp;\\u{9b} |")
        );
    }

    #[test]
    fn plain_strings_are_set_in_columns_too() {
        let rows = [["ddp", "1.5"], ["\u{3b1}", "12.25"]].map(|row| row.map(str::to_owned));
        assert_eq!(
            fitted(&["strategy", "ms"], &rows, |at| at == 0, None),
            "strategy     ms\n--------  -----\nddp         1.5\n\u{3b1}         12.25"
        );
        // Without a head, without rows, and with rows of different lengths.
        let rows = [vec!["a".to_owned()], vec!["bb".to_owned(), "c".to_owned()]];
        assert_eq!(fitted(&[""; 0], &rows, |_| false, None), " a\nbb  c");
        assert_eq!(fitted(&["a", "b"], &[Vec::new()], |_| true, None), "a  b\n-  -\n");
        let none: [Vec<String>; 0] = [];
        assert_eq!(fitted(&["a"], &none, |_| true, None), "a\n-");
        // Letters that take two columns, beside others.
        let rows =
            [["\u{65e5}\u{672c}", "1"], ["abcde", "\u{1f680}"]].map(|row| row.map(str::to_owned));
        assert_eq!(
            fitted(&["name", "at"], &rows, |at| at == 0, None),
            "name   at\n-----  --\n\u{65e5}\u{672c}    1\nabcde  \u{1f680}"
        );
    }

    #[test]
    fn numbers_are_grouped() {
        let all = [(0.0, 0), (-0.04, 1), (-1234.5, 1), (999.999, 2), (1e6, 0)];
        assert_eq!(
            all.map(|(v, d)| grouped(v, d)),
            ["0", "0.0", "-1,234.5", "1,000.00", "1,000,000"]
        );
    }
}
