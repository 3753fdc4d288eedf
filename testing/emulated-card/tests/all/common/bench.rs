//! A kernel on the interpreter, without the driver around it.

use std::sync::Arc;

use paceline_emulated_card::ptx::{Module, PtxKernel, PtxLaunch, parse};
use paceline_emulated_card::{DeviceMemory, Fault};

/// A module and memory to run it on.
pub struct Bench {
    pub module: Module,
    pub memory: DeviceMemory,
    pub seed: u64,
    pub limit: u64,
    variables: Arc<[u64]>,
}

impl Bench {
    pub fn new(text: &str) -> Self {
        let module = parse(text).unwrap();
        let mut memory = DeviceMemory::new(0, 1 << 28);
        let mut place = |bytes: &Vec<u8>| {
            let at = memory.allocate(bytes.len()).unwrap();
            memory.store(at, bytes).unwrap();
            at
        };
        let variables = module.variables.iter().map(|v| place(&v.bytes)).collect();
        Self { module, memory, seed: 0, limit: 1 << 40, variables }
    }

    pub fn kernel(&self, name: &str) -> &PtxKernel {
        self.module.kernels.iter().find(|k| k.name == name).expect("a kernel")
    }

    /// New memory with these contents.
    pub fn upload<T: Copy>(&mut self, values: &[T]) -> u64 {
        let at = self.memory.allocate(size_of_val(values)).unwrap();
        // SAFETY: the bytes of a slice of numbers, which have no padding.
        let bytes = unsafe {
            std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values))
        };
        self.memory.store(at, bytes).unwrap();
        at
    }

    pub fn download<T: Copy + Default>(&self, at: u64, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        // SAFETY: the bytes of a vector of numbers, for which every bit pattern is a value.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(
                values.as_mut_ptr().cast::<u8>(),
                size_of_val(values.as_slice()),
            )
        };
        self.memory.read_out(at, bytes).unwrap();
        values
    }

    /// Runs a kernel with arguments of 8 bytes or less, each cut to its parameter's size.
    pub fn launch(
        &mut self,
        name: &str,
        grid: [u32; 3],
        block: [u32; 3],
        dynamic_shared_bytes: usize,
        arguments: &[u64],
    ) -> Result<u64, Fault> {
        let kernel = self.module.kernels.iter().find(|k| k.name == name).expect("a kernel");
        let mut params = vec![0; kernel.param_bytes];
        assert_eq!(kernel.params.len(), arguments.len());
        for (param, argument) in kernel.params.iter().zip(arguments) {
            params[param.offset..param.offset + param.bytes]
                .copy_from_slice(&argument.to_le_bytes()[..param.bytes]);
        }
        let (kernel, variables) = (kernel.clone(), self.variables.clone());
        let launch = PtxLaunch { kernel, params, grid, block, dynamic_shared_bytes, variables };
        launch.run(&mut self.memory, self.seed, self.limit)
    }
}
