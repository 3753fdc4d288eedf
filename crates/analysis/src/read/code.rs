//! Which line of the user's own Python an event of a stack belongs to.
//!
//! PyTorch records the calls of Python with `with_stack=True`: `train.py(10): step`, with the line where the function begins; newer
//! versions also record the place of the call, `train.py:12`. Paths are relative to the folders that Python imports from, so the first part of a path
//! tells a library from the program. The name or the caller of an event goes in. A line of the program comes out.

use std::sync::LazyLock;

use foldhash::{HashMap, HashSet};

use crate::json::lossy;
use crate::timeline::{NameId, Names};

/// The modules of Python's standard library.
const STANDARD: &str = "abc aifc antigravity argparse array ast asynchat asyncio asyncore atexit audioop base64 bdb binascii bisect builtins \
    bz2 cProfile calendar cgi cgitb chunk cmath cmd code codecs codeop collections colorsys compileall concurrent \
    configparser contextlib contextvars copy copyreg crypt csv ctypes curses dataclasses datetime dbm decimal difflib dis \
    distutils doctest email encodings ensurepip enum errno faulthandler fcntl filecmp fileinput fnmatch fractions ftplib \
    functools gc genericpath getopt getpass gettext glob graphlib grp gzip hashlib heapq hmac html http idlelib imaplib \
    imghdr imp importlib inspect io ipaddress itertools json keyword lib2to3 linecache locale logging lzma mailbox mailcap \
    marshal math mimetypes mmap modulefinder msilib msvcrt multiprocessing netrc nis nntplib nt ntpath nturl2path numbers \
    opcode operator optparse os ossaudiodev pathlib pdb pickle pickletools pipes pkgutil platform plistlib poplib posix \
    posixpath pprint profile pstats pty pwd py_compile pyclbr pydoc pydoc_data pyexpat queue quopri random re readline \
    reprlib resource rlcompleter runpy sched secrets select selectors shelve shlex shutil signal site smtpd smtplib sndhdr \
    socket socketserver spwd sqlite3 sre_compile sre_constants sre_parse ssl stat statistics string stringprep struct \
    subprocess sunau symtable sys sysconfig syslog tabnanny tarfile telnetlib tempfile termios textwrap this threading \
    time timeit tkinter token tokenize tomllib trace traceback tracemalloc tty turtle turtledemo types typing unicodedata \
    unittest urllib uu uuid venv warnings wave weakref webbrowser winreg winsound wsgiref xdrlib xml xmlrpc zipapp zipfile \
    zipimport zlib zoneinfo _collections_abc _weakrefset _compat_pickle";

/// Packages that a program uses.
const PACKAGES: &str = "PIL accelerate apex cv2 datasets deepspeed diffusers functorch huggingface_hub ignite lightning lightning_fabric matplotlib \
    megatron numpy pandas peft pytorch_lightning safetensors scipy sglang sklearn tensorboard tokenizers torch torch_xla torchaudio torchdata \
    torchmetrics torchrec torchtext torchvision tqdm transformer_engine transformers timm triton trl vllm wandb xformers";

static LIBRARIES: LazyLock<HashSet<&str>> =
    LazyLock::new(|| STANDARD.split_whitespace().chain(PACKAGES.split_whitespace()).collect());

/// Whether a file is one of the program.
fn is_own(file: &str) -> bool {
    if file.starts_with('<') || !file.ends_with(".py") {
        return false;
    }
    if file.starts_with('/') {
        let folders = ["/site-packages/", "/dist-packages/", "/lib/python3", "/torchinductor_"];
        return !folders.iter().any(|folder| file.contains(folder));
    }
    let first = file.split('/').next().unwrap_or(file);
    let module = first.strip_suffix(".py").unwrap_or(first);
    !LIBRARIES.contains(module)
}

/// The places in the program of functions and calls of Python, by the text of their events.
#[derive(Default)]
pub(super) struct Places(HashMap<Vec<u8>, Option<NameId>>);

impl Places {
    pub(super) fn of(&mut self, text: &[u8], names: &mut Names) -> Option<NameId> {
        // Built-in methods have addresses of objects in their names.
        if text.starts_with(b"<") {
            return None;
        }
        if let Some(known) = self.0.get(text) {
            return *known;
        }
        let place = place(&lossy(text)).map(|place| names.intern(&place));
        self.0.insert(text.to_owned(), place);
        place
    }
}

/// The place in the program of a function, `train.py(10): step`, or of a call, `train.py:12`; `None` if it is not of the program.
fn place(text: &str) -> Option<String> {
    let is_line = |line: &str| !line.is_empty() && line.bytes().all(|digit| digit.is_ascii_digit());
    if let Some((file, rest)) = text.split_once('(') {
        let (line, function) = rest.split_once("): ")?;
        return (is_line(line) && is_own(file)).then(|| format!("{file}:{line} ({function})"));
    }
    let (file, line) = text.rsplit_once(':')?;
    (is_line(line) && is_own(file)).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_of_the_program() {
        for (text, expected) in [
            ("train.py(10): step", Some("train.py:10 (step)")),
            ("<built-in method randn of type object at 0x7fa5>", None),
            ("data/augment.py:4", Some("data/augment.py:4")),
            ("torch/nn/modules/linear.py(130): forward", None),
            ("nn.Module: Net_0", None),
            ("/home/me/run.py:9", Some("/home/me/run.py:9")),
            ("torch/optim/optimizer.py:563", None),
            ("typing.py(359): inner", None),
            ("<frozen os>(674): __getitem__", None),
            ("<string>:1", None),
            ("/usr/lib/python3.12/random.py(3): f", None),
            ("site.py:x", None),
            ("train.py(): f", None),
        ] {
            assert_eq!(place(text).as_deref(), expected, "{text}");
        }
    }
}
