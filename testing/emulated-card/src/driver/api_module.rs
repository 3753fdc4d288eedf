//! Modules of PTX, kernels and their launches.

use std::collections::HashMap;
use std::sync::Arc;

use crate::boundary::{CText, InPtr, OutPtr, Outcome, Status, export};
use crate::ptx::{PtxLaunch, parse};

use super::state::{Driver, LoadedKernel, Module, enter, enter_stream, guard};
use super::work::CardWork;

/// Shared memory that a block has without asking for more.
const SHARED_BYTES: usize = 49_152;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES` and `..._PREFERRED_SHARED_MEMORY_CARVEOUT`
const DYNAMIC_SHARED: u32 = 8;
const CARVEOUT: u32 = 9;

/// Refuses what a driver of this version and a card of this compute capability would refuse.
fn check_target(driver: &mut Driver, text: &str) -> Outcome {
    let directive = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name))?;
        Some(line.split([' ', '\t', ',', '/']).find(|word| !word.is_empty())?.to_owned())
    };
    let number = |text: &str| text.parse::<u32>().unwrap_or(0);
    if let Some(version) = directive(".version") {
        let (major, minor) = version.split_once('.').unwrap_or((&version, "0"));
        let newest = driver.settings.ptx_version();
        if (number(major), number(minor)) > newest {
            let why = format!("PTX {version}; this driver takes {}.{} at most", newest.0, newest.1);
            return Err(driver.refuse(Status::UNSUPPORTED_PTX, why));
        }
    }
    if let Some(target) = directive(".target") {
        let digits = target.trim_start_matches("sm_");
        let (family, own) = digits.split_at(
            digits.len() - digits.chars().rev().take_while(|c| c.is_alphabetic()).count(),
        );
        let (major, minor) = driver.settings.capability;
        let card = 10 * major + minor;
        if number(family) > card || (!own.is_empty() && number(family) != card) {
            let why = format!("PTX for {target}; the emulated card is sm_{card}");
            return Err(driver.refuse(Status::INVALID_PTX, why));
        }
    }
    Ok(())
}

export! { guard;
fn cuModuleLoadData(module: OutPtr<usize>, image: CText) {
    let (mut driver, card) = enter()?;
    driver.refuse_unsafe("cuModuleLoadData")?;
    let text = image.get().ok_or(Status::INVALID_VALUE)?;
    if text.starts_with("\u{7f}ELF") || !text.contains(".version") {
        return Err(driver.refuse(Status::NO_BINARY, "the emulated card loads PTX only"));
    }
    check_target(&mut driver, &text)?;
    let parsed = match driver.objects.parsed.get(&text) {
        Some(parsed) => parsed.clone(),
        None => {
            let parsed = parse(&text).map(Arc::new);
            let parsed =
                parsed.map_err(|error| driver.refuse(Status::INVALID_PTX, error.to_string()))?;
            driver.objects.parsed.insert(text, parsed.clone());
            parsed
        }
    };
    let memory = &mut driver.cards[card].memory;
    let mut variables = Vec::new();
    for variable in &parsed.variables {
        let at = memory.allocate(variable.bytes.len()).ok_or(Status::OUT_OF_MEMORY)?;
        memory.store(at, &variable.bytes).map_err(|_| Status::UNKNOWN)?;
        variables.push(at);
    }
    let variables: Arc<[u64]> = variables.into();
    let mut functions = HashMap::new();
    for kernel in &parsed.kernels {
        let handle = driver.objects.handle();
        functions.insert(kernel.name.clone(), handle);
        let dynamic_shared_limit = SHARED_BYTES.saturating_sub(kernel.shared_bytes);
        let (kernel, variables) = (kernel.clone(), variables.clone());
        driver.objects.functions.insert(handle, LoadedKernel { kernel, variables, dynamic_shared_limit });
    }
    let handle = driver.objects.handle();
    driver.objects.modules.insert(handle, Module { card, functions, variables });
    module.give(handle, Status::INVALID_VALUE)
}
/// Unloads a module at once: kernels that still wait lose their variables.
fn cuModuleUnload(module: usize) {
    let (mut driver, _) = enter()?;
    let module = driver.objects.modules.remove(&module).ok_or(Status::INVALID_HANDLE)?;
    for function in module.functions.values() {
        driver.objects.functions.remove(function);
    }
    for variable in module.variables.iter() {
        driver.cards[module.card].memory.free(*variable);
    }
    Ok(())
}
fn cuModuleGetFunction(function: OutPtr<usize>, module: usize, name: CText) {
    let (mut driver, _) = enter()?;
    let name = name.get().ok_or(Status::INVALID_VALUE)?;
    let functions = &driver.objects.modules.get(&module).ok_or(Status::INVALID_HANDLE)?.functions;
    match functions.get(&name).copied() {
        Some(handle) if function.set(handle) => Ok(()),
        Some(_) => Err(Status::INVALID_VALUE),
        None => Err(driver.refuse(Status::NOT_FOUND, format!("no kernel `{name}`"))),
    }
}
fn cuFuncGetAttribute(value: OutPtr<i32>, attribute: u32, function: usize) {
    let (driver, _) = enter()?;
    let function = driver.objects.functions.get(&function).ok_or(Status::INVALID_HANDLE)?;
    let kernel = &function.kernel;
    let number = match attribute {
        0 => kernel.max_threads.unwrap_or(1024) as usize,
        1 => kernel.shared_bytes,
        3 => kernel.local_bytes,
        // PTX has registers without end; a card has 255 for a thread.
        4 => kernel.registers.count.min(255) as usize,
        5 | 6 => 90,
        DYNAMIC_SHARED => function.dynamic_shared_limit,
        _ => 0,
    };
    value.give(number as i32, Status::INVALID_VALUE)
}
fn cuFuncSetAttribute(function: usize, attribute: u32, value: i32) {
    let (mut driver, _) = enter()?;
    let most = driver.settings.shared_bytes();
    let function = driver.objects.functions.get_mut(&function).ok_or(Status::INVALID_HANDLE)?;
    let bytes = usize::try_from(value);
    match attribute {
        DYNAMIC_SHARED => match bytes {
            Ok(bytes) if bytes + function.kernel.shared_bytes <= most => {
                function.dynamic_shared_limit = bytes;
                Ok(())
            }
            _ => Err(Status::INVALID_VALUE),
        },
        CARVEOUT => Ok(()),
        _ => Err(Status::INVALID_VALUE),
    }
}
/// Queues a kernel. Its parameters are read now.
fn cuLaunchKernel(
    function: usize,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared_bytes: u32,
    stream: usize,
    arguments: InPtr<InPtr<u8>>,
    extra: usize,
) {
    let (mut driver, _, stream) = enter_stream(stream)?;
    let function = driver.objects.functions.get(&function).cloned().ok_or(Status::INVALID_HANDLE)?;
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let (kernel, shared_bytes) = (&function.kernel, shared_bytes as usize);
    let name = &kernel.name;
    let threads = block.iter().fold(1u64, |n, size| n * u64::from(*size));
    let blocks = grid.iter().fold(1u64, |n, size| n.saturating_mul(u64::from(*size)));
    if extra != 0 {
        return Err(driver.refuse(Status::NOT_SUPPORTED, "`extra` of cuLaunchKernel"));
    }
    let too_large = grid_y > 65_535 || grid_z > 65_535 || blocks >= 1 << 31 || block_z > 64;
    if threads == 0 || threads > 1024 || blocks == 0 || too_large {
        let why = format!("{name}: a grid of {grid:?} blocks of {block:?} threads");
        return Err(driver.refuse(Status::INVALID_VALUE, why));
    }
    if kernel.max_threads.is_some_and(|most| threads > u64::from(most)) {
        let why = format!("{name}: {threads} threads; it was compiled for fewer");
        return Err(driver.refuse(Status::OUT_OF_RESOURCES, why));
    }
    if shared_bytes > function.dynamic_shared_limit {
        let why = format!(
            "{name}: {shared_bytes} bytes of dynamic shared memory; its limit is {}",
            function.dynamic_shared_limit
        );
        return Err(driver.refuse(Status::INVALID_VALUE, why));
    }
    let mut params = vec![0; kernel.param_bytes];
    for (k, param) in kernel.params.iter().enumerate() {
        let bytes = arguments.at(k).and_then(|argument| argument.bytes(param.bytes));
        let bytes = bytes.ok_or(Status::INVALID_VALUE)?;
        params[param.offset..param.offset + param.bytes].copy_from_slice(&bytes);
    }
    let LoadedKernel { kernel, variables, .. } = function;
    let launch = PtxLaunch { kernel, params, grid, block, dynamic_shared_bytes: shared_bytes, variables };
    driver.submit(stream, CardWork::Kernel(Arc::new(launch)))
}
}
