"""Words for prompts: common English ones. With the space before it each is a single token in the vocabularies of
Qwen2.5, Gemma 3 and SmolLM2, and most are in others, so a prompt has nearly as many tokens as words."""

_TEXT = """
able about above act action added age ago air all also always among amount and animal another answer any area around
art asked away back bad ball bank base bed before began behind being below best better between big bird black blood
blue board boat body book both bottom bought box boy bring brother brought brown build building built business but buy
call came can car care carry case cause center certain chair chance change check child children church city class
clean clear close cold color come common company complete contain control cool corner cost could country course cover
cross current cut dark data daughter day dead deal death deep degree design did different direct distance doctor dog
done door down draw dream dress drive drop dry during each early earth east easy eat edge effect eight either electric
else end energy engine enough entire even evening event ever every example experience eye face fact fall family famous
far farm fast father feel feet felt few field fight figure final find fine finger fire first fish five floor flow
follow food foot force form forward found four free fresh friend from front full game garden gas gave general get girl
give glass gold good government grass great green ground group grow had hair half hall hand happy hard has have head
hear heart heat heavy held help here high hill history hold home horse hospital hot hotel hour house how human hundred
ice idea important inch include industry inside interest iron island job join just keep kept key kind king knew know
lake land language large last late law lay lead learn least leave led left leg length less let letter level life light
like line list listen little live local long look lost lot love low machine made main make man many map mark market
matter may mean measure meet member men metal middle might mile milk mind minute miss modern moment money month moon
more morning most mother mountain move much music must name nation natural near need never new next night nine north
nothing notice now number object observe off office often oil old once one only open order other our out over own page
paint pair paper park part party pass past path pattern people per period person phone picture piece place plan plane
plant play point police poor position possible power present president press problem process produce product program
property provide public pull put question quick quite race radio rain ran reach read ready real reason record red
region remember report rest result rich ride right ring rise river road rock room round rule run said salt same sat
saw say scale school science sea season seat second section see seem self sell send sense sent serve service set seven
several shape she ship shop short should show side sign silver similar simple since sing single sister sit six size
skin sky sleep small snow social soft soil soldier some son song soon sound south space speak special speed spring
square staff stage stand star start state station stay step still stone stood stop store story street strong student
study subject success such sudden sugar summer sun support sure surface system table take talk teacher team tell
temperature ten term test than that the their them then there these they thing think third this those thought thousand
three through time together told too took top total touch toward town trade train travel tree trip trouble true try
turn two type under unit until upon use usual valley value very view village visit voice wait walk wall want war warm
was watch water wave way wear weather week weight well went were west what wheel when where which while white who
whole why wide wife wild will wind window winter wish with woman women wood word work world would write year yellow
yes yet you young your
"""
WORDS = tuple(_TEXT.split())
