//! The changes that PyTorch accepts: the quicker forms of its optimizers by device, and the first version that has each function
//! that the advice of a cause names.
//!
//! A trace does not name its version of PyTorch, so an advice that needs more than PyTorch 2.0 says so. A test asks an installed
//! PyTorch whether it has all of this.

/// A version of PyTorch.
type Version = (u32, u32);

/// Older versions are not mentioned.
const COMMON: Version = (2, 0);

/// The optimizers of PyTorch with a fused form, and its first version on a card and on a processor. Only the newest versions have that of
/// Adagrad on cards. In all others it is an error there.
const FUSED: [(&str, [Option<Version>; 2]); 4] = [
    ("Adam", [Some((2, 0)), Some((2, 4))]),
    ("AdamW", [Some((2, 0)), Some((2, 4))]),
    ("SGD", [Some((2, 3)), Some((2, 4))]),
    ("Adagrad", [None, Some((2, 4))]),
];
/// Others that have `foreach=True`, which is quicker than a loop over parameters on a card only.
const FOREACH: &str = "ASGD Adadelta Adamax NAdam RAdam RMSprop Rprop";
/// They have no other form, and cannot be compiled.
const ONE_FORM: &str = "LBFGS SparseAdam";
const COMPILED: &str =
    "step = torch.compile(optimizer.step)\ncall step() in the place of optimizer.step()";

/// The quicker form of an optimizer, by the name of its class; `None` if it has none. `is_foreach` says that the trace shows
/// `foreach=True` already.
pub(super) fn optimizer(name: &str, on_device: bool, is_foreach: bool) -> Option<String> {
    let with = |form: &str| format!("torch.optim.{name}(params, {form}=True)");
    let is_in = |names: &str| names.split(' ').any(|of| of == name);
    let fused = FUSED.iter().find(|(of, _)| *of == name);
    match fused.and_then(|(_, since)| since[usize::from(!on_device)]) {
        Some(since) => Some(format!("{}{}", with("fused"), or_newer(since))),
        None if is_in(ONE_FORM) => None,
        None if on_device && !is_foreach && (fused.is_some() || is_in(FOREACH)) => {
            Some(with("foreach"))
        }
        None => Some(COMPILED.to_owned()),
    }
}

/// Says which version of PyTorch is needed, if that is not common.
fn or_newer(since: Version) -> String {
    if since <= COMMON {
        return String::new();
    }
    format!("  (PyTorch {}.{} or newer)", since.0, since.1)
}

/// The functions that advice names: as written there, how to get it in Python, and the first version that has it.
#[rustfmt::skip]
const FUNCTIONS: [(&str, &str, Version); 45] = [
    ("torch.compile", "torch.compile", (2, 0)),
    ("torch.bernoulli", "torch.bernoulli", (1, 0)),
    ("torch.full", "torch.full", (1, 0)),
    ("torch.multinomial", "torch.multinomial", (1, 0)),
    ("torch.ones", "torch.ones", (1, 0)),
    ("torch.rand", "torch.rand", (1, 0)),
    ("torch.randint", "torch.randint", (1, 0)),
    ("torch.randn", "torch.randn", (1, 0)),
    ("torch.randperm", "torch.randperm", (1, 0)),
    ("torch.zeros", "torch.zeros", (1, 0)),
    ("torch.nn.attention.sdpa_kernel", "torch.nn.attention.sdpa_kernel", (2, 3)),
    ("torch.nn.attention.SDPBackend", "torch.nn.attention.SDPBackend.FLASH_ATTENTION", (2, 3)),
    ("broadcast_buffers", "torch.nn.parallel.DistributedDataParallel(broadcast_buffers)", (1, 0)),
    ("forward_sync_buffers", "torch.nn.parallel.DistributedDataParallel(forward_sync_buffers)", (2, 13)),
    ("torch.nn.functional.scaled_dot_product_attention", "torch.nn.functional.scaled_dot_product_attention", (2, 0)),
    ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint", (1, 0)),
    ("torch.stack", "torch.stack", (1, 0)),
    ("torch.tensor", "torch.tensor", (1, 0)),
    ("torch.where", "torch.where", (1, 0)),
    ("torch.cat", "torch.cat", (1, 0)),
    ("torch.bfloat16", "torch.bfloat16", (1, 4)),
    ("torch.float16", "torch.float16", (1, 0)),
    ("torch.channels_last", "torch.channels_last", (1, 5)),
    ("torch.autocast", "torch.autocast", (1, 10)),
    ("torch.amp.GradScaler", "torch.amp.GradScaler", (2, 3)),
    ("torch.set_float32_matmul_precision", "torch.set_float32_matmul_precision", (1, 12)),
    ("torch.backends.cudnn.allow_tf32", "torch.backends.cudnn.allow_tf32", (1, 7)),
    ("torch.cuda.synchronize", "torch.cuda.synchronize", (1, 0)),
    ("torch.cuda.empty_cache", "torch.cuda.empty_cache", (1, 0)),
    ("torch.cuda.make_graphed_callables", "torch.cuda.make_graphed_callables", (1, 10)),
    ("torch.distributed.batch_isend_irecv", "torch.distributed.batch_isend_irecv", (1, 8)),
    ("torch.distributed._coalescing_manager", "torch.distributed.distributed_c10d._coalescing_manager", (2, 0)),
    ("torch.distributed.pipelining.pipeline", "torch.distributed.pipelining.pipeline", (2, 5)),
    ("bf16_compress_hook", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook", (1, 10)),
    ("register_comm_hook", "torch.nn.parallel.DistributedDataParallel.register_comm_hook", (1, 8)),
    ("no_sync", "torch.nn.parallel.DistributedDataParallel.no_sync", (1, 0)),
    ("bucket_cap_mb", "torch.nn.parallel.DistributedDataParallel(bucket_cap_mb)", (1, 0)),
    ("mixed_precision", "torch.distributed.fsdp.FullyShardedDataParallel(mixed_precision)", (1, 12)),
    ("forward_prefetch", "torch.distributed.fsdp.FullyShardedDataParallel(forward_prefetch)", (1, 12)),
    ("ShardingStrategy.SHARD_GRAD_OP", "torch.distributed.fsdp.ShardingStrategy.SHARD_GRAD_OP", (1, 12)),
    ("set_modules_to_forward_prefetch", "torch.distributed.fsdp.FSDPModule.set_modules_to_forward_prefetch", (2, 6)),
    ("num_workers", "torch.utils.data.DataLoader(num_workers)", (1, 0)),
    ("pin_memory", "torch.utils.data.DataLoader(pin_memory)", (1, 0)),
    ("persistent_workers", "torch.utils.data.DataLoader(persistent_workers)", (1, 7)),
    ("set_to_none", "torch.optim.Optimizer.zero_grad(set_to_none)", (1, 7)),
];

/// The version of PyTorch that a change needs, in brackets; empty if that is common.
pub(super) fn needs(change: &str) -> String {
    let named = FUNCTIONS.iter().filter(|(name, ..)| change.contains(name));
    or_newer(named.map(|(.., since)| *since).max().unwrap_or(COMMON))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;
    use std::{env, fs};

    use super::*;

    #[test]
    fn an_optimizer_gets_a_form_that_its_device_has() {
        let form = |name, on_device| optimizer(name, on_device, false);
        for (name, on_device, expected) in [
            ("AdamW", true, Some("torch.optim.AdamW(params, fused=True)")),
            ("SGD", true, Some("torch.optim.SGD(params, fused=True)  (PyTorch 2.3 or newer)")),
            ("Adagrad", true, Some("torch.optim.Adagrad(params, foreach=True)")),
            (
                "Adagrad",
                false,
                Some("torch.optim.Adagrad(params, fused=True)  (PyTorch 2.4 or newer)"),
            ),
            ("RMSprop", true, Some("torch.optim.RMSprop(params, foreach=True)")),
            ("RMSprop", false, Some(COMPILED)),
            ("Lion", true, Some(COMPILED)),
            ("LBFGS", true, None),
        ] {
            assert_eq!(form(name, on_device).as_deref(), expected, "{name}");
        }
        // Nothing that the program has already.
        assert_eq!(optimizer("Adagrad", true, true).as_deref(), Some(COMPILED));
        assert_eq!(needs("torch.compile(model)"), "");
        let both = "with torch.autocast(\"cuda\"): ...  (with torch.amp.GradScaler)";
        assert_eq!(needs(both), "  (PyTorch 2.3 or newer)");
    }

    /// The dotted names that begin with `torch.` in a text.
    fn names(text: &str) -> Vec<&str> {
        let begins = text.match_indices("torch.").map(|(at, _)| at);
        let is_name =
            |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '.';
        let begins = begins.filter(|at| !text[..*at].ends_with(is_name));
        let ends = |at: usize| {
            text[at..].find(|letter| !is_name(letter)).map_or(text.len(), |len| at + len)
        };
        begins.map(|at| text[at..ends(at)].trim_end_matches('.')).collect()
    }

    #[test]
    fn every_function_of_pytorch_that_a_cause_names_is_in_the_table() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/doctor/causes");
        let mut missing = Vec::new();
        let mut found = 0;
        for file in fs::read_dir(folder).unwrap() {
            let text = fs::read_to_string(file.unwrap().path()).unwrap();
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            for name in code.flat_map(names).filter(|name| !name.starts_with("torch.optim")) {
                found += 1;
                if !FUNCTIONS
                    .iter()
                    .any(|(known, path, _)| *known == name || path.starts_with(name))
                {
                    missing.push(name.to_owned());
                }
            }
        }
        assert!(found > 10 && missing.is_empty(), "{found} {missing:?}");
    }

    /// Asks PyTorch for every function, argument and fused kernel. The Python of `PACELINE_PEER_PYTHON` has it.
    const ASK: &str = "
import importlib, inspect, sys, torch
version = tuple(int(part) for part in torch.__version__.split('.')[:2])
def get(path):
    parts = path.split('.')
    for end in range(len(parts), 0, -1):
        try:
            of = importlib.import_module('.'.join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            of = getattr(of, part)
        return of
asked = 0
for line in sys.stdin.read().splitlines():
    kind, since, *rest = line.split(' ')
    if version < tuple(int(part) for part in since.split('.')):
        continue
    asked += 1
    if kind == 'function':
        path, _, argument = rest[0].rstrip(')').partition('(')
        found = get(path)
        assert not argument or argument in inspect.signature(found).parameters, line
    elif kind == 'kernel':
        assert torch._C._dispatch_has_kernel_for_dispatch_key('aten::_fused_%s_' % rest[0].lower(), rest[1]), line
    else:
        assert rest[1] in inspect.signature(getattr(torch.optim, rest[0])).parameters, line
print('asked', asked)
";

    #[test]
    fn an_installed_pytorch_has_what_is_advised() {
        let Some(python) = env::var_os("PACELINE_PEER_PYTHON") else {
            return eprintln!("left out: PACELINE_PEER_PYTHON does not name a Python with PyTorch");
        };
        let mut lines = Vec::new();
        for (_, path, (major, minor)) in FUNCTIONS {
            lines.push(format!("function {major}.{minor} {path}"));
        }
        for (name, versions) in FUSED {
            for (since, key) in versions.iter().zip(["CUDA", "CPU"]) {
                if let Some((major, minor)) = since {
                    lines.push(format!("argument {major}.{minor} {name} fused"));
                    lines.push(format!("kernel {major}.{minor} {name} {key}"));
                }
            }
        }
        let foreach = FUSED.iter().map(|of| of.0).chain(FOREACH.split(' '));
        lines.extend(foreach.map(|name| format!("argument 2.0 {name} foreach")));
        let folder = tempfile::tempdir().unwrap();
        let asked = folder.path().join("asked");
        fs::write(&asked, lines.join("\n")).unwrap();
        let mut command = Command::new(python);
        let output =
            command.args(["-c", ASK]).stdin(fs::File::open(asked).unwrap()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(said.starts_with("asked "), "{said}");
    }
}
