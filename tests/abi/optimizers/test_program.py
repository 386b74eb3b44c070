"""Programs of the rules: every register in range, and the bits that say what a rule does not have."""

import pytest

from nearflash.abi.errors import CommandError
from nearflash.abi.formats import fp32_value
from nearflash.abi.kernel.commands import UpdateCommand
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, Profile, SgdStep
from nearflash.abi.optimizers.program import Direction, program_registers
from nearflash.abi.registers import UPDATE

PROGRAMS = {
    AdamStep(1e-3, 1): (Direction.RATIO, 0, 0),
    SgdStep(0.1, 1): (Direction.MOMENT, 1, 1),
    SgdStep(0.1, 2, momentum=0.9, weight_decay=0.1): (Direction.MOMENT, 0, 1),
    SgdStep(0.1, 2, momentum=0.9, nesterov=True, profile=Profile.TORCH_FUSED): (Direction.LOOKAHEAD, 0, 1),
    AdagradStep(0.1, 2, weight_decay=0.1): (Direction.RATIO, 1, 0),
    LionStep(1e-3, 2, weight_decay=0.1): (Direction.SIGN, 0, 1),
}


@pytest.mark.parametrize("rule", PROGRAMS, ids=str)
def test_registers_are_in_range_and_say_what_is_absent(rule) -> None:  # type: ignore[no-untyped-def]
    arrays = dict.fromkeys(("p", *rule.arrays), 0x1000)
    values = UpdateCommand(rule, 7, arrays | {"g": 0}, arrays).registers()
    assert set(values) == {register.name for register in UPDATE if register.access == "rw"}
    assert all(0 <= value < 1 << UPDATE[name].width_bits for name, value in values.items())
    program = UPDATE["program"].unpack(values["program"])
    assert (program["direction"], program["m_absent"], program["v_absent"]) == PROGRAMS[rule]
    assert (values["m_address"], values["v_out_address"]) == (arrays.get("m", 0), arrays.get("v", 0))


def test_an_absent_m_becomes_the_gradient() -> None:
    """-0 times the zero that is read for it, plus one times the gradient: exactly that, a negative zero too."""
    for rule in (SgdStep(0.1, 5), AdagradStep(0.1, 5), SgdStep(0.1, 1, momentum=0.9)):
        values = program_registers(rule)
        assert (values["m_decay"], fp32_value(values["m_gain"])) == (0x80000000, 1.0)


def test_a_rule_without_a_program_is_refused() -> None:
    class Other(AdamStep):
        pass

    assert program_registers(Other(1e-3, 1))  # a kind of Adam
    with pytest.raises(CommandError, match="rule must be one that the lane has a program for, not 5"):
        program_registers(5)  # type: ignore[arg-type]


def test_narrow_state_sets_its_registers() -> None:
    """A command of fp32 state leaves the addresses of scales zero."""
    for form, code in (("fp32", 0), ("bf16", 1), ("mx8", 2)):
        rule = AdamStep(1e-3, (1 << 32) + 5, state_format=form)
        inputs = {name: 0x1000 * (n + 1) for n, name in enumerate(("g", "p", *rule.arrays))}
        outputs = {name: 0x10000 + address for name, address in inputs.items() if name != "g"}
        values = UpdateCommand(rule, 64, inputs, outputs, first_param=1 << 39).registers()
        assert UPDATE["program"].unpack(values["program"])["state_format"] == code
        assert (values["step"], values["first_param"]) == (5, 1 << 39)
        for name in ("m", "m_scale", "v", "v_scale"):
            assert values[f"{name}_address"] == inputs.get(name, 0)
            assert values[f"{name}_out_address"] == outputs.get(name, 0)
