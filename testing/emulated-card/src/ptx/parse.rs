//! From PTX text to a module.
//!
//! Knows declarations, scopes, labels and kernels; [`super::decode`] knows the instructions. What the interpreter
//! cannot run is an error with its line, and is never skipped.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::decode;
use super::instruction::*;
use super::operand::{OperandNames, immediate, vector};
use super::scalar::PtxType;
use super::source::{PtxPart, split, split_list};

/// Why a text is not a module that can run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// The line, counted from 1.
    pub line: u32,
    /// The problem.
    pub message: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}: {}", self.line, self.message)
    }
}

impl std::error::Error for ParseError {}

/// Parses a text.
pub fn parse(text: &str) -> Result<Module, ParseError> {
    let lines: Arc<[String]> = text.lines().map(tidy).collect();
    let mut parser = Parser::default();
    for (line, part) in split(text) {
        parser.part(line, part, &lines).map_err(|message| {
            let kernel = parser.kernel.as_ref().map(|k| format!("kernel {}: ", k.kernel.name));
            ParseError { line, message: kernel.unwrap_or_default() + &message }
        })?;
    }
    if parser.kernel.is_some() {
        let line = lines.len() as u32;
        return Err(ParseError { line, message: "the text ends within a kernel".into() });
    }
    Ok(parser.module)
}

#[derive(Default)]
struct Parser {
    module: Module,
    /// Shared variables of the module: every kernel has its own copy of them.
    shared: Vec<String>,
    symbols: HashMap<String, Constant>,
    kernel: Option<Builder>,
    depth: u32,
}

impl Parser {
    fn part(&mut self, line: u32, part: PtxPart, lines: &Arc<[String]>) -> Result<(), String> {
        match (part, &mut self.kernel) {
            (PtxPart::Open(head), None) if head.contains(".entry") => {
                let mut builder = Builder::new(&head, self.symbols.clone(), lines.clone())?;
                for variable in &self.shared {
                    builder.variable(variable)?;
                }
                self.kernel = Some(builder);
                self.depth = 1;
            }
            (PtxPart::Open(head), _) if !head.is_empty() => {
                return Err(format!(
                    "`{head}`: functions are not emulated; force-inline them into the kernel"
                ));
            }
            (PtxPart::Open(_), builder) => {
                self.depth += 1;
                if let Some(builder) = builder {
                    builder.names.open();
                }
            }
            (PtxPart::Close, builder) => {
                self.depth = self.depth.checked_sub(1).ok_or("a brace too many")?;
                if let Some(builder) = builder {
                    builder.names.close();
                }
                if self.depth == 0
                    && let Some(builder) = self.kernel.as_mut()
                {
                    let kernel = builder.finish()?;
                    self.kernel = None;
                    self.module.kernels.push(Arc::new(kernel));
                }
            }
            (PtxPart::Label(name), Some(builder)) => builder.label(name)?,
            (PtxPart::Statement(text), Some(builder)) => builder.statement(line, &text)?,
            (PtxPart::Statement(text), None) => self.global_statement(&text)?,
            (PtxPart::Label(name), _) => return Err(format!("label `{name}` outside a kernel")),
        }
        Ok(())
    }

    fn global_statement(&mut self, text: &str) -> Result<(), String> {
        if text.is_empty() {
            return Ok(());
        }
        if text.contains(".shared") {
            self.shared.push(text.into());
            return Ok(());
        }
        if !text.contains(".global") && !text.contains(".const") {
            return Err(format!("`{text}` is not emulated"));
        }
        let (declaration, initializer) = match text.split_once('=') {
            Some((d, i)) => (d.trim(), Some(i.trim())),
            None => (text, None),
        };
        let declared = Declared::parse(declaration)?;
        let mut bytes = vec![0; declared.bytes];
        for (k, value) in initializer.into_iter().flat_map(vector).enumerate() {
            let value = immediate(value).ok_or_else(|| format!("initializer `{value}`"))?;
            let size = declared.scalar.bytes;
            let target = bytes.get_mut(k * size..(k + 1) * size).ok_or("too many initializers")?;
            target.copy_from_slice(&value.to_le_bytes()[..size]);
        }
        let index = Constant::Variable(self.module.variables.len());
        self.symbols.insert(declared.name.clone(), index);
        self.module.variables.push(Variable { name: declared.name, bytes });
        Ok(())
    }
}

/// `.shared .align 4 .b8 name[128]`
struct Declared {
    name: String,
    scalar: PtxType,
    align: usize,
    bytes: usize,
}

impl Declared {
    fn parse(text: &str) -> Result<Self, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let scalar = words.iter().find_map(|w| PtxType::parse(w.strip_prefix('.')?));
        let scalar = scalar.ok_or_else(|| format!("`{text}` has no type"))?;
        // The name may be apart from its dimensions.
        let at = words.iter().rposition(|w| !w.starts_with('[')).unwrap_or(0);
        let full = words[at..].concat();
        let (name, dims) = full.split_once('[').unwrap_or((&full, ""));
        let mut count = 1;
        for dim in dims.split(['[', ']']).filter(|d| !d.is_empty()) {
            count *= dim.parse::<usize>().map_err(|_| format!("dimension `{dim}`"))?;
        }
        if dims == "]" {
            count = 0;
        }
        let align = words.iter().position(|w| *w == ".align").map(|k| words.get(k + 1));
        let align = match align.flatten() {
            Some(align) => align.parse().map_err(|_| format!("alignment `{align}`"))?,
            None => scalar.bytes,
        };
        Ok(Self { name: name.into(), scalar, align, bytes: count * scalar.bytes })
    }
}

/// A kernel while its text is read.
pub(super) struct Builder {
    pub(super) kernel: PtxKernel,
    pub(super) names: OperandNames,
    labels: HashMap<String, u32>,
    tables: HashMap<String, Vec<String>>,
    /// Branches and the names of their targets.
    pub(super) branches: Vec<(usize, Vec<String>)>,
    /// `brx.idx` and the names of their tables.
    pub(super) table_branches: Vec<(usize, String)>,
    last_label: Option<String>,
}

impl Builder {
    fn new(
        head: &str,
        symbols: HashMap<String, Constant>,
        lines: Arc<[String]>,
    ) -> Result<Self, String> {
        let after = head.split(".entry").nth(1).unwrap_or_default();
        let (name, rest) = after.split_once('(').unwrap_or((after, ")"));
        let (list, directives) = rest.split_once(')').ok_or("parameters without an end")?;
        let name = name.split_whitespace().next().unwrap_or_default();
        let mut kernel = PtxKernel { name: name.into(), lines, ..PtxKernel::default() };
        let mut names = OperandNames::new(symbols);
        for text in split_list(list) {
            let declared = Declared::parse(text)?;
            let offset = kernel.param_bytes.next_multiple_of(declared.align);
            names.params.insert(declared.name, offset);
            kernel.params.push(Parameter { offset, bytes: declared.bytes });
            kernel.param_bytes = offset + declared.bytes;
        }
        for directive in [".maxntid", ".reqntid"] {
            if let Some((_, list)) = directives.split_once(directive) {
                let list = list.split('.').next().unwrap_or_default();
                let sizes: Result<Vec<u32>, _> =
                    list.split(',').map(|size| size.trim().parse()).collect();
                let sizes = sizes.map_err(|_| format!("`{directive}{list}`"))?;
                kernel.max_threads = Some(sizes.iter().product());
            }
        }
        if directives.contains("cluster") {
            return Err("thread block clusters are not emulated".into());
        }
        Ok(Self {
            kernel,
            names,
            labels: HashMap::new(),
            tables: HashMap::new(),
            branches: Vec::new(),
            table_branches: Vec::new(),
            last_label: None,
        })
    }

    fn label(&mut self, name: String) -> Result<(), String> {
        let at = self.kernel.code.len() as u32;
        if self.labels.insert(name.clone(), at).is_some() {
            return Err(format!("label `{name}` stands twice"));
        }
        self.last_label = Some(name);
        Ok(())
    }

    fn variable(&mut self, text: &str) -> Result<(), String> {
        let declared = Declared::parse(text)?;
        let symbol = if text.contains(".extern") {
            Constant::DynamicShared
        } else {
            let end = if text.contains(".shared") {
                &mut self.kernel.shared_bytes
            } else {
                &mut self.kernel.local_bytes
            };
            let offset = end.next_multiple_of(declared.align);
            *end = offset + declared.bytes;
            Constant::Value(offset as u64)
        };
        self.names.symbols.insert(declared.name, symbol);
        Ok(())
    }

    fn statement(&mut self, line: u32, text: &str) -> Result<(), String> {
        let first = text.split_whitespace().next().unwrap_or_default();
        match first {
            "" | ".pragma" => return Ok(()),
            ".reg" => return self.registers(text),
            ".shared" | ".local" | ".extern" => return self.variable(text),
            ".branchtargets" => {
                let list = text.trim_start_matches(".branchtargets");
                let targets = list.split(',').map(|t| t.trim().to_owned()).collect();
                let name = self.last_label.take().ok_or("a table without a name")?;
                self.tables.insert(name, targets);
                return Ok(());
            }
            _ if first.starts_with('.') => return Err(format!("`{first}` is not emulated")),
            _ => {}
        }
        let (guard, rest) = match text.strip_prefix('@') {
            Some(rest) => {
                let (guard, rest) = rest.split_once(' ').ok_or("a guard without instruction")?;
                (Some(self.names.pred_operand(guard)?), rest.trim())
            }
            None => (None, text),
        };
        let op = decode::decode(self, rest).map_err(|e| format!("`{text}`: {e}"))?;
        self.kernel.code.push(Instruction { guard, op, line });
        Ok(())
    }

    /// Names that do not begin with `%` are known only by their declaration.
    fn registers(&mut self, text: &str) -> Result<(), String> {
        let is_pred = text.split_whitespace().any(|w| w == ".pred");
        let names = text.split_whitespace().filter(|w| !w.starts_with('.'));
        let names = names.flat_map(|w| w.split(','));
        for name in names.filter(|name| !name.is_empty() && !name.contains('<')) {
            self.names.declaration(name, is_pred)?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<PtxKernel, String> {
        let find = |name: &String| {
            self.labels.get(name).copied().ok_or_else(|| format!("label `{name}` does not exist"))
        };
        for (at, names) in &self.branches {
            self.kernel.code[*at].op = PtxOp::Branch(find(&names[0])?);
        }
        for (at, table) in &self.table_branches {
            let names = self.tables.get(table).ok_or_else(|| format!("table `{table}`"))?;
            let found: Result<Vec<u32>, String> = names.iter().map(find).collect();
            if let PtxOp::BranchTable { targets, .. } = &mut self.kernel.code[*at].op {
                *targets = found?;
            }
        }
        let mut kernel = std::mem::take(&mut self.kernel);
        // A kernel may end without `ret`.
        let line = kernel.code.last().map_or(0, |i| i.line);
        kernel.code.push(Instruction { guard: None, op: PtxOp::Exit, line });
        kernel.registers = std::mem::take(&mut self.names).finish();
        Ok(kernel)
    }
}

fn tidy(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}
