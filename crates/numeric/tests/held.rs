//! A process that is held to instructions. It is one for the whole process, so this test has an executable of its own.

use paceline_numeric::{Instructions, SimdLevel};

#[test]
fn a_process_keeps_the_instructions_that_it_is_held_to() {
    for of in Instructions::ALL {
        assert_eq!(of.name().parse(), Ok(of));
    }
    assert!("sse9".parse::<Instructions>().is_err());
    assert_eq!(Instructions::Portable.hold(), Ok(()));
    assert_eq!(Instructions::Portable.hold(), Ok(()));
    assert_eq!(Instructions::Avx2.hold(), Err(Some(Instructions::Portable)));
    assert_eq!(Instructions::held(), Some(Instructions::Portable));
    assert_eq!(SimdLevel::of_process(), SimdLevel::Portable);
}
